"""Why each rollout of a batch was kept or not, by the part of the recipe that dropped it."""

from __future__ import annotations

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


def reasons(recipe: Recipe, judged: Experience, num_kept: int) -> list[str]:
    """One reason per rollout, in uid order; runs the credit steps again, one by one."""
    found = [KEPT] * len(judged.kept)
    for uid in (~judged.kept).nonzero().flatten().tolist():
        found[uid] = CUT if judged.truncated[uid] else NO_VERDICT
    experience = judged
    for step in recipe.credit:
        after = step(experience, num_kept)
        for uid in (experience.kept & ~after.kept).nonzero().flatten().tolist():
            found[uid] = reason_of(step)
        experience = after
    return found
