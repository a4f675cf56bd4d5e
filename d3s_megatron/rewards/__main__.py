"""`python -m d3s_megatron.rewards --file CASES.jsonl`: grade a file of answers, one JSON object a line."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter

from d3s_megatron.rewards.config import RewardConfig
from d3s_megatron.rewards.reward import make_reward


def read_cases(path: str) -> list[dict[str, str]]:
    """Rows of a JSONL file with the keys id, gold and prediction; a broken row is a ValueError that names its line."""
    cases = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not a JSON object: {error}") from error
            missing = [key for key in ("id", "gold", "prediction") if not isinstance(row, dict) or key not in row]
            if missing:
                raise ValueError(f"{path}:{number}: missing {', '.join(missing)}; a row has id, gold and prediction")
            gold = "" if row["gold"] is None else str(row["gold"])
            cases.append({"id": row["id"], "gold": gold, "prediction": str(row["prediction"])})
    return cases


def main(arguments: list[str] | None = None) -> int:
    """Print one {"id", "value", "status"} a case, in order; value is null where no verdict was reached."""
    parser = argparse.ArgumentParser(prog="python -m d3s_megatron.rewards", description=__doc__)
    parser.add_argument("--file", required=True, help="JSONL with id, gold and prediction")
    parser.add_argument("--kind", default=RewardConfig.kind, help="math_verify, exact, or module:function")
    parser.add_argument("--num-workers", type=int, default=RewardConfig.num_workers)
    parser.add_argument("--deadline-seconds", type=float, default=RewardConfig.deadline_seconds)
    parser.add_argument("--memory-limit-mb", type=int, default=RewardConfig.memory_limit_mb)
    options = parser.parse_args(arguments)
    try:
        config = RewardConfig(
            kind=options.kind,
            num_workers=options.num_workers,
            deadline_seconds=options.deadline_seconds,
            memory_limit_mb=options.memory_limit_mb,
        )
        cases = read_cases(options.file)
        reward = make_reward(config)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    with reward:
        verdicts = reward.grade([(case["prediction"], case["gold"]) for case in cases])
    for case, verdict in zip(cases, verdicts, strict=True):
        value = None if math.isnan(verdict.value) else verdict.value
        print(json.dumps({"id": case["id"], "value": value, "status": verdict.status}))
    counts = Counter(verdict.status for verdict in verdicts)
    print(", ".join(f"{status}: {num}" for status, num in counts.most_common()) or "no cases", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
