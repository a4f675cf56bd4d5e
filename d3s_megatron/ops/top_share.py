"""The exact top share of scores over all ranks, without gathering scores (method 4, rows 13 and 23)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from d3s_megatron.ops.checks import require, require_vector
from d3s_megatron.types import Reduce

LAST = (1 << 63) - 1  # the largest (uid, position) coordinate: a cut there takes every tie
DIGIT = 11  # bits a round looks at: a histogram of 2048 int64 is 16 KB to reduce


@dataclass(frozen=True)
class ShareCut:
    """The border of a top share; with it a mask can be made anywhere without storing one.

    A token is kept where its score is above `threshold`, or equal to it and (uid, position) <= (tie_uid, tie_position).
    """

    threshold: float
    tie_uid: int
    tie_position: int
    num_kept: int  # k, over all ranks
    num_scores: int  # n, over all ranks

    def mask(self, scores: Tensor, uid: Tensor, position: Tensor) -> Tensor:
        """Which of these scores [n] float32 are kept: [n] bool; uid and position as given to `top_share_cut`."""
        if self.num_kept == 0:
            return torch.zeros_like(scores, dtype=torch.bool)
        threshold = torch.tensor(self.threshold, dtype=torch.float32, device=scores.device)
        before = (uid < self.tie_uid) | ((uid == self.tie_uid) & (position <= self.tie_position))
        return (scores > threshold) | ((scores == threshold) & before)


def num_top(rho: float, n: int) -> int:
    """k = min(n, max(1, ceil(rho n - 1e-9))): how many of n tokens a share rho keeps."""
    return min(n, max(1, math.ceil(rho * n - 1e-9)))


def top_share(scores: Tensor, rho: float, uid: Tensor, position: Tensor, reduce: Reduce | None = None) -> Tensor:
    """Mask of this rank's tokens among the k = num_top(rho, n) largest scores of all ranks; exactly k in all.

    Args: scores [n] float32, finite, n may be 0 on some ranks; rho in [0, 1], the same on every rank; uid [n] int64,
    already hashed, and position [n] int64: together unique over all ranks, equal scores are taken in their order;
    reduce: in-place reduction over the ranks of the batch, None for one process.
    Every rank must call; what moves is some small integer histograms, whatever n is.
    Returns [n] bool. Raises ValueError on every rank when any rank has NaN or an infinity.
    """
    return _select(scores, rho, uid, position, reduce, want_mask=True)[1]


def top_share_cut(scores: Tensor, rho: float, uid: Tensor, position: Tensor, reduce: Reduce | None = None) -> ShareCut:
    """The border of the same selection as `top_share`, without a mask."""
    return _select(scores, rho, uid, position, reduce, want_mask=False)[0]


def _select(
    scores: Tensor, rho: float, uid: Tensor, position: Tensor, reduce: Reduce | None, want_mask: bool
) -> tuple[ShareCut, Tensor]:
    require_vector("scores", scores, torch.float32)
    require_vector("uid", uid, torch.int64, scores)
    require_vector("position", position, torch.int64, scores)
    require(0.0 <= rho <= 1.0, f"rho={rho}; pass a share from 0 to 1")
    cut = reference_cut(scores, rho, uid, position, reduce or _alone)
    return cut, cut.mask(scores, uid, position) if want_mask else scores


def _alone(tensor: Tensor, how: str) -> Tensor:
    return tensor


def reference_cut(scores: Tensor, rho: float, uid: Tensor, position: Tensor, reduce: Reduce) -> ShareCut:
    """Torch reference of `top_share_cut`: radix selection by 11 + 11 + 10 bits, then the ties by uid and position."""
    counts = torch.stack([torch.tensor(len(scores), device=scores.device), scores.isnan().sum(), scores.isinf().sum()])
    n, num_nan, num_inf = reduce(counts, "sum").tolist()
    refuse_not_finite(num_nan, num_inf, n)
    k = num_top(rho, n)
    if k == 0:
        return ShareCut(math.inf, LAST, LAST, 0, 0)
    bits = (scores + 0.0).view(torch.int32)  # + 0.0: minus zero ties with zero
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()  # signed ints in the order of the floats
    key, ties_kept, num_ties = _nth(-keys - 1, k, 32, reduce)  # -keys - 1 = ~keys: ascending is descending
    key = -key - 1
    restored = torch.tensor(key if key >= 0 else key ^ 0x7FFFFFFF, dtype=torch.int32)
    threshold = restored.view(torch.float32).item()
    if ties_kept == num_ties:
        return ShareCut(threshold, LAST, LAST, k, n)
    tied = keys == key
    tie_uid, left, num_same = _nth(uid[tied], ties_kept, 64, reduce)
    if left == num_same:
        return ShareCut(threshold, tie_uid, LAST, k, n)
    tie_position, _, _ = _nth(position[tied & (uid == tie_uid)], left, 64, reduce)
    return ShareCut(threshold, tie_uid, tie_position, k, n)


def refuse_not_finite(num_nan: int, num_inf: int, n: int) -> None:
    """Raise ValueError where any of the n scores of all ranks is NaN or infinite."""
    require(
        num_nan == 0 and num_inf == 0,
        f"scores hold {num_nan} NaN and {num_inf} infinite values among {n} on all ranks; look at the log-probs "
        "and advantages they were made of",
    )


def _nth(values: Tensor, nth: int, width: int, reduce: Reduce) -> tuple[int, int, int]:
    """The nth smallest (from 1) of all ranks' signed values of `width` bits; its rank among equals; the equals."""
    low, high = reduce(_ends(values), "max").tolist()
    low = -1 - low
    prefix, known = low, width  # bits still unknown are below `known`
    while known > 0 and (low >> (known - 1)) == (high >> (known - 1)):
        known -= 1  # the ends agree here: no round is spent on it
    prefix = low >> known
    num_same = None
    while known > 0:
        step = min(DIGIT, known)
        here = values[(values >> known) == prefix] if known < width else values
        digits = (here >> (known - step)) & ((1 << step) - 1)
        if known == width:
            digits = digits ^ (1 << (step - 1))  # the top digit holds the sign: negative values come first
        counts = reduce(torch.bincount(digits, minlength=1 << step), "sum")
        below = counts.cumsum(0)
        digit = int(torch.searchsorted(below, nth))
        num_same = int(counts[digit])
        nth -= int(below[digit]) - num_same
        if known == width:
            digit ^= 1 << (step - 1)
            digit -= (digit >> (step - 1)) << step
            prefix = digit
        else:
            prefix = (prefix << step) | digit
        known -= step
    if num_same is None:  # all equal
        num_same = int(reduce((values == low).sum(), "sum"))
        prefix = low
    return prefix, nth, num_same


def _ends(values: Tensor) -> Tensor:
    """[-1 - min, max] of values: one "max" reduction gives both ends; an empty rank does not count."""
    if len(values) == 0:
        return torch.full((2,), -LAST - 1, dtype=torch.int64, device=values.device)
    return torch.stack([-1 - values.min(), values.max()])
