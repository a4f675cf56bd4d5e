"""How tensors become kernel launches on a GPU. The kernels come as an argument: the compiled module's, or a test's.

Each function queues work on the current stream and reads nothing back, save for one look at the end of a selection.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from d3s_megatron.types import Reduce

ITEM_BYTES = 24  # sizeof(Item) in csrc/include/d3s/cuda/max_variance.cuh
STATE_WORDS = 8  # int64 words of ShareState in csrc/include/d3s/cuda/top_share.cuh
COUNTS = 2048 + 2
LARGEST_SEGMENT = 1 << 17  # one block sorts a segment; above this torch.sort over the whole device is faster
# (level, shift, bits) of the rounds: the score's key, then the uid, then the position, 11 bits at a time
ROUNDS = [(0, 21, 11), (0, 10, 11), (0, 0, 10)]
ROUNDS += [(level, shift, 11 if shift < 53 else 9) for level in (1, 2) for shift in (55, 44, 33, 22, 11, 0)]


def cuda_kernels(ext: Any, tensor: Tensor) -> Any | None:
    """The compiled module's CUDA kernels where they were built and the tensor is on a GPU; else None."""
    return getattr(ext, "cuda", None) if ext is not None and tensor.is_cuda else None


def select_variance(kernels: Any, values: Tensor, m: int, tie_key: Tensor, segments: Tensor | None) -> Tensor | None:
    """As max_variance.reference; None where a segment is too large for one block. Raises on values not finite."""
    n, device = len(values), values.device
    if segments is None:
        if n > LARGEST_SEGMENT:
            return None
        order = torch.arange(n, device=device)
        sizes = torch.full((1,), n, dtype=torch.int64, device=device)
    else:
        if n > LARGEST_SEGMENT:  # sizes are known to the device only; any may be the whole batch
            return None
        order = segments.argsort(stable=True)
        is_new = segments[order].diff(prepend=segments[order[:1]] - 1) != 0
        # as many slots as there are values, the unused ones empty: the number of segments is never read back
        sizes = torch.zeros(n, dtype=torch.int64, device=device)
        sizes.scatter_add_(0, is_new.cumsum(0) - 1, torch.ones_like(order))
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    borders = torch.cat([zero, sizes.cumsum(0)])
    room = 1 << torch.frexp((sizes - 1).clamp(min=0).double()).exponent.long()  # the next power of two
    items_at = torch.cat([zero, torch.where(sizes > 0, room, 0).cumsum(0)])
    items = torch.empty(2 * max(n, 1) * ITEM_BYTES, dtype=torch.uint8, device=device)
    sums = torch.empty(4 * (n + len(sizes)), dtype=torch.float64, device=device)
    mask = torch.zeros(n, dtype=torch.bool, device=device)
    status = torch.zeros(1, dtype=torch.int32, device=device)
    kernels.max_variance(values, tie_key, order, borders, items_at, m, items, sums, mask, status)
    if device.type == "cuda":  # no host sync: a value that is not finite stops the stream instead
        torch._assert_async(status[0] == 0)
    return mask


def select_share(
    kernels: Any, scores: Tensor, uid: Tensor, position: Tensor, k: int, n: int, reduce: Reduce, mask: Tensor | None
) -> Tensor:
    """Queue the whole selection; returns its ShareState, int64 words on the device."""
    state = torch.zeros(STATE_WORDS, dtype=torch.int64, device=scores.device)
    state[3], state[4] = k, n
    counts = torch.zeros(COUNTS, dtype=torch.int64, device=scores.device)
    for level, shift, bits in ROUNDS:
        kernels.share_histogram(scores, uid, position, level, shift, bits, state, counts)
        reduce(counts, "sum")
        kernels.share_pick(level, shift, bits, state, counts)
    if mask is not None:
        kernels.share_mask(scores, uid, position, state, mask)
    return state
