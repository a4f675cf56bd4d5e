"""Sample selection (method 1.6, 1.7): the subset of maximum variance, in each group or over the whole batch.

`RandomSamples` is its control: the same number, whichever they are.

The advantages of what is kept stay as they are: nothing is normalised again (method 4, row 3).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from d3s_megatron import ops
from d3s_megatron.algorithms.groups import number_groups
from d3s_megatron.types import Experience

MIN_KEPT = 2  # a variance needs two values (method 4, row 9)
CHANCE = 0x5EED  # one more word for mix64, so that a random choice and the order of ties are not the same draw


def tie_keys(experience: Experience) -> Tensor:
    """[N] int64 pseudo-random order of equal values, from (seed, step, uid); never arrival order."""
    return ops.mix64(experience.seed, experience.step, experience.uids)


@dataclass(frozen=True)
class MaxVariance:
    """Credit step: keeps the rollouts whose rewards or advantages have the largest variance.

    With scope "group" each group keeps N; with "batch" the pool is every rollout of the batch and N x groups are
    kept, wherever they come from. A pool smaller than that is kept whole.
    """

    of: Literal["reward", "advantage"]
    scope: Literal["group", "batch"]

    gives: ClassVar[str] = "selection"
    uses_budget: ClassVar[bool] = True

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({self.of + "s"})

    def __call__(self, experience: Experience, num_kept: int) -> Experience:
        kept = experience.kept
        pool = slice(None) if bool(kept.all()) else kept  # rollouts with a verdict, n of N: all of them need no copy
        values = experience.rewards if self.of == "reward" else experience.advantages
        groups = experience.group_ids[pool] if self.scope == "group" else None
        budget = num_kept if self.scope == "group" else num_kept * number_groups(experience.group_ids)[1]
        chosen = ops.max_variance_subset(
            values[pool], max(MIN_KEPT, budget), tie_keys(experience)[pool], segments=groups
        )
        return replace(experience, kept=kept.masked_scatter(kept, chosen))


@dataclass(frozen=True)
class RandomSamples:
    """Credit step: keeps N x groups rollouts of the whole batch by chance; a pool smaller than that is kept whole.

    The draw is a hash of (seed, step, uid), so it is the same on every layout and after a resume.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    gives: ClassVar[str] = "selection"
    uses_budget: ClassVar[bool] = True

    def __call__(self, experience: Experience, num_kept: int) -> Experience:
        pool = experience.kept.nonzero().flatten()  # [n] rollouts with a verdict
        budget = max(MIN_KEPT, num_kept * number_groups(experience.group_ids)[1])
        draw = ops.mix64(experience.seed, experience.step, experience.uids[pool], CHANCE)
        kept = experience.kept.new_zeros(len(experience.kept))
        kept[pool[draw.argsort()[:budget]]] = True
        return replace(experience, kept=kept)


@dataclass(frozen=True)
class DropZero:
    """Credit step: drops kept rollouts whose advantage is 0, so that fewer than N may be left (method 4, row 7)."""

    needs: ClassVar[frozenset[str]] = frozenset({"advantages"})
    gives: ClassVar[str] = "selection"
    uses_budget: ClassVar[bool] = False

    def __call__(self, experience: Experience, num_kept: int) -> Experience:
        return replace(experience, kept=experience.kept & (experience.advantages != 0))
