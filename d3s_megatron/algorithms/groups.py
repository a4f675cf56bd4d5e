"""Groups of a batch by number, without a sort where their ids ascend, as those of a batch do."""

from __future__ import annotations

import torch
from torch import Tensor


def number_groups(group_ids: Tensor) -> tuple[Tensor, int]:
    """([N] int64, which group each rollout belongs to, from 0 in the order of the ids; how many groups there are)."""
    ascending = not bool((group_ids[1:] < group_ids[:-1]).any())
    ids, group = (torch.unique_consecutive if ascending else torch.unique)(group_ids, return_inverse=True)
    return group, len(ids)
