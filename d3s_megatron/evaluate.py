"""Accuracy of a policy on held-out problems: avg@n and the unbiased pass@k, with the rooms that training uses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from d3s_megatron.rewards import Reward
from d3s_megatron.rollout import RolloutEngine, Sampling, make_requests
from d3s_megatron.types import Prompt

CORRECT_FROM = 0.5  # a reward of at least this counts as solved
PASS_AT = (1, 2, 4, 8, 16, 32, 64)
EVAL_STEP = -1  # evaluation draws the same random numbers every time, so before and after differ by weights alone

GatherRows = Callable[[Tensor], list[Tensor]]


@dataclass(frozen=True)
class Evaluation:
    """Means over the problems; the unbiased `pass_at[1]` is the accuracy (avg@n)."""

    num_problems: int
    num_samples: int
    pass_at: dict[int, float]
    response_length: float
    cut_share: float  # answers that reached the length limit
    num_without_verdict: int  # counted as not solved

    def as_row(self) -> dict[str, float]:
        """Flat names for the log."""
        row = {f"eval/pass@{k}": value for k, value in self.pass_at.items()}
        return row | {
            "eval/response_length": self.response_length,
            "eval/cut_share": self.cut_share,
            "eval/num_without_verdict": self.num_without_verdict,
        }


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Probability that k of n samples, drawn without replacement, hold a correct one: 1 - C(n-c, k) / C(n, k)."""
    if not 1 <= k <= num_samples:
        raise ValueError(f"k is {k} with {num_samples} samples: give 1 <= k <= samples")
    assert 0 <= num_correct <= num_samples, (num_correct, num_samples)
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def pass_at_first_k(solved: Sequence[bool], k: int) -> float:
    """1 where any of the first k samples is correct, else 0: the other reading of pass@k (method 4, row 25)."""
    return float(any(solved[:k]))


def rank_share(num: int, rank: int, world_size: int) -> range:
    """The slots of one rank, contiguous; sizes differ by at most one."""
    return range(num * rank // world_size, num * (rank + 1) // world_size)


def evaluate_policy(
    engine: RolloutEngine,
    reward: Reward,
    prompts: Sequence[Prompt],
    num_samples: int,
    sampling: Sampling,
    seed: int,
    share: range,
    gather: GatherRows,
    pass_kind: Literal["unbiased", "first"] = "unbiased",
) -> Evaluation:
    """Samples `num_samples` answers a prompt and judges them; a collective, each rank does its `share` of prompts.

    `pass_kind` "first" takes pass@k over the first k samples of a prompt only; pass@1 is then no longer avg@n.
    """
    mine = [prompts[i] for i in share]
    requests = make_requests(mine, num_samples, seed, EVAL_STEP, first_group=share.start)
    rollouts = engine.generate(requests, sampling) if requests else []
    verdicts = reward.grade([(r.text, r.request.prompt.answer) for r in rollouts]) if rollouts else []
    rows = torch.tensor(
        [
            (v.value >= CORRECT_FROM, len(r.token_ids), r.finish_reason == "length", math.isnan(v.value))
            for r, v in zip(rollouts, verdicts, strict=True)
        ],
        dtype=torch.float64,
    )
    table = torch.cat(gather(rows.flatten())).view(-1, 4)  # [prompts * num_samples, 4]
    solved = table[:, 0].view(len(prompts), num_samples).bool().tolist()

    def pass_at(row: list[bool], k: int) -> float:
        return pass_at_first_k(row, k) if pass_kind == "first" else pass_at_k(num_samples, sum(row), k)

    return Evaluation(
        num_problems=len(prompts),
        num_samples=num_samples,
        pass_at={k: sum(pass_at(row, k) for row in solved) / len(solved) for k in PASS_AT if k <= num_samples},
        response_length=float(table[:, 1].mean()),
        cut_share=float(table[:, 2].mean()),
        num_without_verdict=int(table[:, 3].sum()),
    )
