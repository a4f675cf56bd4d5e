"""What n graded answers to each of P problems say of a model: the one place where training and the command meet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from d3s_megatron.evaluate.estimators import (
    CONFIDENCE,
    NUM_BOOTSTRAP,
    Estimate,
    estimate,
    maj_at_k,
    pass_at_first_k,
    pass_at_k,
    resampled_means,
)
from d3s_megatron.rewards import STATUSES

CORRECT_FROM = 0.5  # a reward of at least this counts as solved

PassKind = Literal["unbiased", "first"]


@dataclass(frozen=True)
class Answer:
    """One graded answer."""

    solved: bool | None  # None where no verdict was reached
    status: str
    vote: Hashable | None  # answers with equal votes are the same (votes.py); None does not vote
    num_tokens: int
    cut: bool  # at the length limit


@dataclass(frozen=True)
class Evaluation:
    """Means over the problems of one set; the unbiased `pass_at[1]` is the accuracy (avg@n)."""

    name: str
    num_problems: int
    num_samples: int
    pass_at: dict[int, Estimate]
    maj_at: dict[int, Estimate]
    response_length: float
    cut_share: float  # answers that reached the length limit
    statuses: dict[str, int]
    num_without_verdict: int  # counted as not solved
    pass_kind: PassKind
    seed: int  # of the bootstrap
    per_problem: Mapping[str, Tensor] = field(repr=False, compare=False)  # [P] each, "pass@8" and the like

    def as_row(self) -> dict[str, float]:
        """Flat names for the log of a run."""
        row = {f"eval/pass@{k}": one.value for k, one in self.pass_at.items()}
        row |= {f"eval/maj@{k}": one.value for k, one in self.maj_at.items()}
        row |= {"eval/accuracy_low": self.pass_at[1].low, "eval/accuracy_high": self.pass_at[1].high}
        row |= {f"eval/rewards/{status}": num for status, num in self.statuses.items()}
        return row | {
            "eval/response_length": self.response_length,
            "eval/cut_share": self.cut_share,
            "eval/num_without_verdict": self.num_without_verdict,
        }

    def as_json(self) -> dict[str, Any]:
        """What SET.json holds; shares between 0 and 1."""

        def cells(estimates: dict[int, Estimate]) -> dict[str, dict[str, float]]:
            return {str(k): vars(one) for k, one in estimates.items()}

        return {
            "set": self.name,
            "num_problems": self.num_problems,
            "num_samples": self.num_samples,
            "pass_kind": self.pass_kind,
            "pass@k": cells(self.pass_at),
            "maj@k": cells(self.maj_at),
            "mean_length": self.response_length,
            "cut_share": self.cut_share,
            "statuses": self.statuses,
            "num_without_verdict": self.num_without_verdict,
            "bootstrap": {"draws": NUM_BOOTSTRAP, "confidence": CONFIDENCE, "seed": self.seed},
        }


def summarise(
    name: str,
    answers: Sequence[Sequence[Answer]],
    ks: Sequence[int],
    seed: int,
    pass_kind: PassKind = "unbiased",
) -> Evaluation:
    """The evaluation of `answers` [P][n]; a k above n is left out, and maj@k is for k above 1.

    `pass_kind` "first" takes pass@k over the first k samples of a problem only; pass@1 is then no longer avg@n.
    """
    num_samples = len(answers[0])
    assert all(len(row) == num_samples for row in answers), "every problem has the same number of answers"
    ks = [k for k in ks if k <= num_samples]
    solved = [[answer.solved for answer in row] for row in answers]
    votes = [[answer.vote for answer in row] for row in answers]

    def pass_at(row: Sequence[bool | None], k: int) -> float:
        return pass_at_first_k(row, k) if pass_kind == "first" else pass_at_k(num_samples, sum(map(bool, row)), k)

    columns = {f"pass@{k}": [pass_at(row, k) for row in solved] for k in ks}
    columns |= {f"maj@{k}": [maj_at_k(v, s, k) for v, s in zip(votes, solved, strict=True)] for k in ks if k > 1}
    per_problem = {column: torch.tensor(values, dtype=torch.float64) for column, values in columns.items()}
    means = resampled_means(torch.stack(list(per_problem.values())), seed, name)
    found = {
        column: estimate(float(values.mean()), of_column)
        for (column, values), of_column in zip(per_problem.items(), means, strict=True)
    }
    everything = [answer for row in answers for answer in row]
    statuses = Counter(answer.status for answer in everything)
    return Evaluation(
        name=name,
        num_problems=len(answers),
        num_samples=num_samples,
        pass_at={k: found[f"pass@{k}"] for k in ks},
        maj_at={k: found[f"maj@{k}"] for k in ks if k > 1},
        response_length=sum(answer.num_tokens for answer in everything) / len(everything),
        cut_share=sum(answer.cut for answer in everything) / len(everything),
        statuses={status: statuses[status] for status in [*STATUSES, *sorted(set(statuses) - set(STATUSES))]},
        num_without_verdict=sum(answer.solved is None for answer in everything),
        pass_kind=pass_kind,
        seed=seed,
        per_problem=per_problem,
    )


def average(evaluations: Sequence[Evaluation]) -> dict[str, Estimate]:
    """Mean over the sets, each with the same weight, of every column that all of them have; {"pass@1": ...}."""
    first = evaluations[0].per_problem
    shared = [column for column in first if all(column in one.per_problem for one in evaluations)]
    tables = [torch.stack([one.per_problem[column] for column in shared]) for one in evaluations]  # [C, P] each
    means = [resampled_means(values, one.seed, one.name) for values, one in zip(tables, evaluations, strict=True)]
    value = torch.stack([values.mean(1) for values in tables]).mean(0)
    found = torch.stack(means).mean(0)
    return {column: estimate(float(value[i]), found[i]) for i, column in enumerate(shared)}
