"""The smallest task worth learning: sums of two numbers below 100, `12+34=` to `046`.

All 10,000 pairs are shuffled with the seed; 9,000 train and 1,000 are held out. Both sides are padded with zeros so
that every prompt has six characters and every answer three: a model of 0.3M parameters learns it in seconds.

    python -m d3s_megatron.data.arithmetic --out DIR --seed 0
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from d3s_megatron.data.problems import Problem
from d3s_megatron.ops import mix64

NUM_TRAIN = 9_000


def arithmetic_problems(seed: int) -> tuple[list[Problem], list[Problem]]:
    """The (train [9000], held-out [1000]) problems of a seed; the two never share a pair."""
    order = mix64(seed, torch.arange(100 * 100)).argsort(stable=True).tolist()
    problems = [
        Problem(id=f"add-{a:02d}-{b:02d}", problem=f"{a:02d}+{b:02d}=", answer=f"{a + b:03d}")
        for a, b in (divmod(pair, 100) for pair in order)
    ]
    return problems[:NUM_TRAIN], problems[NUM_TRAIN:]


def write_arithmetic(folder: str | Path, seed: int) -> tuple[Path, Path]:
    """Writes train.jsonl and eval.jsonl into a folder, made where it is missing, and returns their paths."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "train.jsonl", folder / "eval.jsonl"
    for path, problems in zip(paths, arithmetic_problems(seed), strict=True):
        rows = (json.dumps({"id": p.id, "problem": p.problem, "answer": p.answer}) for p in problems)
        path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return paths


def main() -> None:
    """Command line: writes the two files and says where."""
    parser = argparse.ArgumentParser(description="Write the arithmetic task: train.jsonl and eval.jsonl.")
    parser.add_argument("--out", required=True, help="folder for the two files")
    parser.add_argument("--seed", type=int, default=0, help="which pairs are held out (default 0)")
    args = parser.parse_args()
    for path in write_arithmetic(args.out, args.seed):
        print(path)


if __name__ == "__main__":
    main()
