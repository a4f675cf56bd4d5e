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


def reasons(recipe: Recipe, judged: Experience, num_kept: int) -> tuple[list[str], Tensor]:
    """(reasons, [N] int64 which of them is each rollout's, in uid order); runs the credit steps one by one again."""
    names = [KEPT, NO_VERDICT, CUT]
    found = torch.zeros(len(judged.kept), dtype=torch.int64)
    found[~judged.kept] = 1
    found[~judged.kept & judged.truncated] = 2
    experience = judged
    for step in recipe.credit:
        after = step(experience, num_kept)
        dropped = experience.kept & ~after.kept
        if dropped.any():
            found[dropped] = len(names)
            names.append(reason_of(step))
        experience = after
    return names, found
