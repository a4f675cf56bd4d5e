"""Group advantages (method 1.1): A_i = (r_i - mean) / std over the group's kept rollouts, sample std (ddof 1)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from d3s_megatron.types import Experience


def group_advantages(rewards: Tensor, group_ids: Tensor, kept: Tensor, normalize_std: bool = True) -> Tensor:
    """Advantage of each rollout within its group.

    Args:
        rewards: [N] of any dtype; computed in float64.
        group_ids: [N] int64.
        kept: [N] bool, the rollouts that form the groups; the others get 0.

    Returns:
        [N] float64. 0 for a group of one, and exactly 0 where all rewards of a group are equal: that is decided by
        comparing rewards, as rounding leaves equal rewards a tiny spread (fault D02).
    """
    out = torch.zeros(len(rewards), dtype=torch.float64)
    if not kept.any():
        return out
    values = rewards[kept].to(torch.float64)
    _, group = group_ids[kept].unique(return_inverse=True)  # [n]
    num_groups = int(group.max()) + 1

    def per_group(kind: str, of: Tensor, start: float) -> Tensor:
        base = torch.full((num_groups,), start, dtype=torch.float64)
        return base.scatter_reduce(0, group, of, reduce=kind, include_self=kind == "sum")

    count = per_group("sum", torch.ones_like(values), 0.0)
    centered = values - (per_group("sum", values, 0.0) / count)[group]
    equal = per_group("amax", values, 0.0) == per_group("amin", values, 0.0)  # groups of one too
    if normalize_std:
        variance = per_group("sum", centered**2, 0.0) / (count - 1).clamp(min=1)
        centered = centered / variance.sqrt().masked_fill(equal, 1.0)[group]
    out[kept] = centered.masked_fill(equal[group], 0.0)
    return out


@dataclass(frozen=True)
class GroupAdvantages:
    """Credit step: fills `advantages` from the rewards of the kept rollouts."""

    normalize_std: bool = True

    needs: ClassVar[frozenset[str]] = frozenset({"rewards"})
    gives: ClassVar[str] = "advantages"

    def __call__(self, experience: Experience, num_kept: int) -> Experience:
        return replace(
            experience,
            advantages=group_advantages(experience.rewards, experience.group_ids, experience.kept, self.normalize_std),
        )
