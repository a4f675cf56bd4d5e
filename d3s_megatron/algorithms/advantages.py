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
        rewards: [N] of any dtype, finite where kept; computed in float64.
        group_ids: [N] int64.
        kept: [N] bool, the rollouts that form the groups; the others get 0.

    Returns:
        [N] float64. Exactly 0 for a group of one and where all rewards of a group are equal, whatever they are
        (faults D01, D02). Groups with the same rewards have the same advantages bit for bit, in any order of their
        rollouts: rounding must not decide between them where the method draws by hash (method 4, row 4).
    """
    out = torch.zeros(len(rewards), dtype=torch.float64)
    if not kept.any():
        return out
    _, group = group_ids[kept].unique(return_inverse=True)  # [n]
    values, order = rewards[kept].to(torch.float64).sort(stable=True)  # so that no sum depends on the rows' order
    group = group[order]
    num_groups = int(group.max()) + 1

    def per_group(kind: str, of: Tensor) -> Tensor:
        base = torch.zeros(num_groups, dtype=torch.float64)
        return base.scatter_reduce(0, group, of, reduce=kind, include_self=False)

    count = per_group("sum", torch.ones_like(values))
    low = per_group("amin", values)
    spread = per_group("amax", values) - low
    above = values - low[group]  # equal rewards are exactly 0 from here on, and near ones keep their digits
    if normalize_std:
        above = above / spread.masked_fill(spread == 0, 1.0)[group]  # squares can neither overflow nor vanish
    centered = above - (per_group("sum", above) / count)[group]
    if normalize_std:
        variance = per_group("sum", centered**2) / (count - 1).clamp(min=1)
        centered = centered / variance.sqrt().masked_fill(spread == 0, 1.0)[group]
    out[kept.nonzero().flatten()[order]] = centered
    return out


@dataclass(frozen=True)
class GroupAdvantages:
    """Credit step: fills `advantages` from the rewards of the kept rollouts."""

    normalize_std: bool = True

    needs: ClassVar[frozenset[str]] = frozenset({"rewards"})
    gives: ClassVar[str] = "advantages"
    uses_budget: ClassVar[bool] = False

    def __call__(self, experience: Experience, num_kept: int) -> Experience:
        return replace(
            experience,
            advantages=group_advantages(experience.rewards, experience.group_ids, experience.kept, self.normalize_std),
        )
