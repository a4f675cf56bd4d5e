"""Why each rollout of a batch was kept or not, by the part of the recipe that dropped it."""

from __future__ import annotations

import torch
from torch import Tensor

from d3s_megatron.algorithms.recipes import CreditStep, Recipe
from d3s_megatron.algorithms.sample_selection import DropZero, MaxVariance, RandomSamples
from d3s_megatron.types import Experience

KEPT = "kept"
NO_VERDICT = "no verdict"
CUT = "cut at the length limit"  # and algorithm.truncated is exclude


def reason_of(step: CreditStep) -> str:
    """What a rollout is told that this step dropped."""
    if isinstance(step, MaxVariance):
        where = "of its group" if step.scope == "group" else "of the batch"
        return f"not in the subset {where} with the largest {step.of} variance"
    if isinstance(step, RandomSamples):
        return "not drawn"
    if isinstance(step, DropZero):
        return "advantage is zero"
    return f"dropped by {step}"


def reasons(recipe: Recipe, judged: Experience, selected: Experience, num_kept: int) -> tuple[list[str], Tensor]:
    """(reasons, [N] int64 which of them is each rollout's, in uid order).

    Args:
        judged, selected: the batch before and after the recipe.
        num_kept: N; where several steps select, they run again one by one.
    """
    names = [KEPT, NO_VERDICT, CUT]
    found = torch.zeros(len(judged.kept), dtype=torch.int64)
    found[~judged.kept] = 1
    found[~judged.kept & judged.truncated] = 2

    def blame(step: CreditStep, dropped: Tensor) -> None:
        if dropped.any():
            found[dropped] = len(names)
            names.append(reason_of(step))

    selecting = [step for step in recipe.credit if step.gives == "selection"]
    if len(selecting) == 1:
        blame(selecting[0], judged.kept & ~selected.kept)
        return names, found
    experience = judged
    for step in recipe.credit:
        after = step(experience, num_kept)
        blame(step, experience.kept & ~after.kept)
        experience = after
    return names, found
