"""The contract of a reward, and the ones we have: exact, math_verify, a function of the user's, and their mixture."""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Self

from d3s_megatron.rewards.config import RewardConfig
from d3s_megatron.rewards.pool import WorkerPool
from d3s_megatron.types import Rollout, Verdict

STATUSES = ("right", "wrong", "no_answer", "unparsable_gold", "timeout", "crash")
MATH_JUDGE = "d3s_megatron.rewards.math_judge:judge"
_WARN_FROM = 8  # answers in a call; fewer may all be wrong by chance


logger = logging.getLogger(__name__)


class Reward:
    """Judges answers; use it as a context manager or call `close()`.

    Example:
        with make_reward(RewardConfig(kind="exact")) as reward:
            reward.grade([("046", "046")])  # [Verdict(value=1.0, status="right")]
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def grade(self, items: Sequence[tuple[str, str]]) -> list[Verdict]:
        """One verdict for every (answer text, gold), in order; NaN where none was reached even after a retry."""
        verdicts = self._grade([(text, str(gold)) for text, gold in items])
        self._counts.update(verdict.status for verdict in verdicts)
        if len(verdicts) >= _WARN_FROM and not any(verdict.value > 0 for verdict in verdicts):
            counts = dict(Counter(verdict.status for verdict in verdicts))
            logger.warning("not one of %d answers was rewarded: %s", len(verdicts), counts)
        return verdicts

    def numbers(self) -> list[float]:
        """What happened since the last report, as numbers that add up over the processes that judge."""
        return [float(self._counts[status]) for status in STATUSES]

    def report(self, numbers: Sequence[float] | None = None) -> dict[str, float]:
        """What happened since the last report, for the run log: how many answers had each status; then start anew.

        Args:
            numbers: sums of what `numbers()` gives in every process that judges; this one's alone where not given.
        """
        numbers = self.numbers() if numbers is None else numbers
        self._counts.clear()
        return {f"rewards/{status}": number for status, number in zip(STATUSES, numbers, strict=True)}

    def close(self) -> None:
        """End what the reward has started."""

    def _grade(self, items: list[tuple[str, str]]) -> list[Verdict]:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def grade_rollouts(reward: Reward, rollouts: Sequence[Rollout]) -> list[Verdict]:
    """One verdict a rollout, in order; nothing is asked where there is none."""
    return reward.grade([(r.text, r.request.prompt.answer) for r in rollouts]) if rollouts else []


class ExactReward(Reward):
    """The answer text is the gold, white space around both left out; for tasks whose whole answer is one string."""

    def _grade(self, items: list[tuple[str, str]]) -> list[Verdict]:
        return [_exact(text.strip(), gold.strip()) for text, gold in items]


def _exact(text: str, gold: str) -> Verdict:
    if not gold:
        return Verdict(0.0, "unparsable_gold")
    if not text:
        return Verdict(0.0, "no_answer")
    return Verdict(1.0, "right") if text == gold else Verdict(0.0, "wrong")


class PooledReward(Reward):
    """A judge that runs in killable worker processes."""

    def __init__(self, judge: str, config: RewardConfig) -> None:
        super().__init__()
        self._pool = WorkerPool(judge, config.num_workers, config.deadline_seconds, config.memory_limit_mb)

    def _grade(self, items: list[tuple[str, str]]) -> list[Verdict]:
        return [Verdict(math.nan if r.value is None else r.value, r.status) for r in self._pool.map(items)]

    def close(self) -> None:
        self._pool.close()


class MixtureReward(Reward):
    """sum_k weight_k * value_k; without a verdict where any part is; the status is that of the first part to fail so,
    and of the first part otherwise."""

    def __init__(self, parts: dict[str, Reward], weights: dict[str, float]) -> None:
        super().__init__()
        self._parts, self._weights = parts, weights
        self._sums: dict[str, float] = defaultdict(float)
        self._num_values: Counter[str] = Counter()

    def _grade(self, items: list[tuple[str, str]]) -> list[Verdict]:
        columns = {name: part.grade(items) for name, part in self._parts.items()}
        for name, column in columns.items():
            values = [verdict.value for verdict in column if not math.isnan(verdict.value)]
            self._sums[name] += sum(values)
            self._num_values[name] += len(values)
        return [self._mix(row) for row in zip(*columns.values(), strict=True)]

    def _mix(self, row: tuple[Verdict, ...]) -> Verdict:
        value = sum(weight * verdict.value for weight, verdict in zip(self._weights.values(), row, strict=True))
        failed = [verdict.status for verdict in row if math.isnan(verdict.value)]
        return Verdict(value, failed[0] if failed else row[0].status)

    def numbers(self) -> list[float]:
        numbers = super().numbers()
        for name, part in self._parts.items():
            numbers += [self._sums[name], float(self._num_values[name]), *part.numbers()]
        return numbers

    def report(self, numbers: Sequence[float] | None = None) -> dict[str, float]:
        """As every reward's, and the unweighted mean of each part (NaN where it judged nothing)."""
        rest = list(self.numbers() if numbers is None else numbers)

        def take(num: int) -> list[float]:
            taken, rest[:] = rest[:num], rest[num:]
            return taken

        report = super().report(take(len(STATUSES)))
        for name, part in self._parts.items():
            value, num = take(2)
            report[f"rewards/{name}/mean"] = value / num if num else math.nan
            counts = part.report(take(len(part.numbers())))
            report |= {key.replace("rewards/", f"rewards/{name}/", 1): count for key, count in counts.items()}
        self._sums.clear()
        self._num_values.clear()
        return report

    def close(self) -> None:
        for part in self._parts.values():
            part.close()


def make_reward(config: RewardConfig) -> Reward:
    """The reward a configuration names.

    Raises:
        ValueError: a function of the user's cannot be imported.
    """
    if config.kind != "mixture":
        return _make_part(config.kind, config)
    parts: dict[str, Reward] = {}
    try:
        for name in config.mixture:
            parts[name] = _make_part(name, config)
    except BaseException:
        for part in parts.values():
            part.close()
        raise
    return MixtureReward(parts, dict(config.mixture))


def _make_part(kind: str, config: RewardConfig) -> Reward:
    if kind == "exact":
        return ExactReward()
    return PooledReward(MATH_JUDGE if kind == "math_verify" else kind, config)
