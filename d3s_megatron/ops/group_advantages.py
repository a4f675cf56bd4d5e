"""Group advantages (method 1.1): A_i = (r_i - mean) / std over the group's kept rollouts, sample std (ddof 1)."""

from __future__ import annotations

import torch
from torch import Tensor

from d3s_megatron.ops import extension
from d3s_megatron.ops.checks import require, require_tensor, require_vector


def group_advantages(rewards: Tensor, group_ids: Tensor, kept: Tensor, normalize_std: bool = True) -> Tensor:
    """Advantage of each rollout within its group.

    Args:
        rewards: [N] of any dtype, finite where kept; computed in float64.
        group_ids: [N] int64, any ids in any order.
        kept: [N] bool, the rollouts that form the groups; the others get 0.
        normalize_std: False only takes the mean away.

    Returns:
        [N] float64. Exactly 0 for a group of one and where all rewards of a group are equal, whatever they are
        (faults D01, D02). Groups with the same rewards have the same advantages bit for bit, in any order of their
        rollouts: rounding must not decide between them where the method draws by hash (method 4, row 4).
        Raises ValueError on NaN and infinity among the kept rewards.
    """
    require_tensor("rewards", rewards)
    require(not rewards.is_complex(), f"rewards has dtype {rewards.dtype}; pass real numbers")
    rewards = rewards.to(torch.float64)
    require_vector("rewards", rewards, torch.float64)
    require_vector("group_ids", group_ids, torch.int64, rewards)
    require_vector("kept", kept, torch.bool, rewards)
    ext = extension.module()
    if ext is not None and rewards.is_cpu:
        out = torch.empty(rewards.shape, dtype=torch.float64)
        ext.group_advantages(rewards.contiguous(), group_ids.contiguous(), kept.contiguous(), normalize_std, out)
        return out
    wrong = kept & ~rewards.isfinite()
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0])
        raise ValueError(f"rewards[{at}]={rewards[at].item()}; take rollouts without a finite reward out before")
    return reference(rewards, group_ids, kept, normalize_std)


def reference(rewards: Tensor, group_ids: Tensor, kept: Tensor, normalize_std: bool) -> Tensor:
    """Torch reference of `group_advantages`."""
    out = torch.zeros_like(rewards)
    if not bool(kept.any()):
        return out
    _, group = group_ids[kept].unique(return_inverse=True)  # [n]
    values, order = rewards[kept].sort(stable=True)  # so that no sum depends on the rows' order
    group = group[order]
    num_groups = int(group.max()) + 1

    def per_group(kind: str, of: Tensor) -> Tensor:
        return of.new_zeros(num_groups).scatter_reduce(0, group, of, reduce=kind, include_self=False)

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
