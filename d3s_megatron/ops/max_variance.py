"""The subset of fixed size with the largest variance (method 1.6): k highest and m - k lowest, for the best k."""

from __future__ import annotations

import torch
from torch import Tensor

from d3s_megatron.ops import extension
from d3s_megatron.ops.checks import is_whole, require, require_vector
from d3s_megatron.ops.cuda import cuda_kernels, select_variance

TIE_TOLERANCE = 1e-12  # splits whose variances are this close, relatively, are one: float64 noise must not choose


def max_variance_subset(values: Tensor, m: int, tie_key: Tensor, segments: Tensor | None = None) -> Tensor:
    """Mask of the m values whose variance is largest; with segments, m of every segment.

    Args: values [n] float64, finite; tie_key [n] int64, orders equal values (ascending), then the index does;
    segments [n] int64, any ids in any order. A segment of at most m values is kept whole.
    Splits tied within 1e-12 relative: the most balanced, then the one with more high values.
    Returns [n] bool on the device of `values`. Raises ValueError on NaN, infinity, or m < 0.
    """
    require_vector("values", values, torch.float64)
    require_vector("tie_key", tie_key, torch.int64, values)
    if segments is not None:
        require_vector("segments", segments, torch.int64, values)
    require(is_whole(m) and m >= 0, f"m={m}; pass the number of values to keep, 0 or more")
    m = min(int(m), values.numel())
    ext = extension.module()
    if ext is not None and values.is_cpu:
        mask = torch.empty(values.shape, dtype=torch.bool)
        segments = None if segments is None else segments.contiguous()
        ext.max_variance_subset(values.contiguous(), m, tie_key.contiguous(), segments, mask)
        return mask
    kernels = cuda_kernels(ext, values)
    if kernels is not None:
        segments = None if segments is None else segments.contiguous()
        chosen = select_variance(kernels, values.contiguous(), m, tie_key.contiguous(), segments)
        if chosen is not None:
            return chosen
    finite = values.isfinite()
    if not bool(finite.all()):
        at = int((~finite).nonzero()[0])
        raise ValueError(f"values[{at}]={values[at].item()}; take rows that are not finite out before selection")
    return reference(values, m, tie_key, segments)


def reference(values: Tensor, m: int, tie_key: Tensor, segments: Tensor | None = None) -> Tensor:
    """Torch reference of `max_variance_subset`, by sorting and prefix sums."""
    if segments is None:
        return _one(values, m, tie_key)
    mask = torch.zeros_like(values, dtype=torch.bool)
    for segment in segments.unique():
        rows = (segments == segment).nonzero()[:, 0]
        mask[rows] = _one(values[rows], m, tie_key[rows])
    return mask


def _one(values: Tensor, m: int, tie_key: Tensor) -> Tensor:
    n = len(values)
    mask = torch.zeros_like(values, dtype=torch.bool)
    if m >= n:
        return ~mask
    order = tie_key.argsort(stable=True)
    order = order[values[order].argsort(stable=True, descending=True)]
    kept = best_split(values[order], m)
    mask[order[:kept]] = True
    mask[order[n - (m - kept) :]] = True
    return mask


def best_split(descending: Tensor, m: int) -> int:
    """How many of the m come from the top: the k of method 1.6, step 6, for sorted values [n] and m < n."""
    if m == 0 or descending[0] == descending[-1]:
        return (m + 1) // 2  # no variance anywhere: the most balanced; a mean that is off by an ulp must not decide
    x = descending / torch.maximum(descending[0].abs(), descending[-1].abs())  # squares must not leave float64
    x = x - x.mean()
    top, bottom = x[:m], x.flip(0)[:m]  # summed from both ends: no difference of two large sums
    zero = x.new_zeros(1)
    total = torch.cat([zero, top.cumsum(0)]) + torch.cat([zero, bottom.cumsum(0)]).flip(0)
    squares = torch.cat([zero, (top * top).cumsum(0)]) + torch.cat([zero, (bottom * bottom).cumsum(0)]).flip(0)
    spread = squares - total * total / m  # m * population variance for k = 0..m
    best = spread.max()
    tied = (spread >= best - TIE_TOLERANCE * best.abs()).nonzero()[:, 0]
    off_balance = (2 * tied - m).abs()
    return int(tied[off_balance == off_balance.min()].max())
