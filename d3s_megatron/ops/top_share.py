"""The exact top share of scores over all ranks, without gathering scores (method 4, rows 13 and 23)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from d3s_megatron.ops import extension
from d3s_megatron.ops.checks import is_real, require, require_vector
from d3s_megatron.ops.cuda import cuda_kernels, select_share
from d3s_megatron.types import RankedReduce, Reduce

LAST = (1 << 63) - 1  # the largest (uid, position) coordinate: a cut there takes every tie
DIGIT = 11  # bits a round looks at: a histogram of 2048 int64 is 16 KB to reduce
SAMPLE_BINS = 1 << DIGIT
SIGMAS = 4.5  # half a bracket: one search in 100,000 misses it and reads the scores twice
BRACKET_ABOVE = 1 << 18  # up to here a list of all scores is as cheap as a sample
LARGE_PAGE = 1 << 21
LARGE_MASK = 1 << 23  # from here on two more large pages are a small part of it
FEW_RANKS, FEW_SCORES = 64, 1 << 12  # what is cheaper to send (100 KB) than to search in a dozen rounds
LEAST_KEY, LARGEST_KEY = 0x00800000, 0xFF7FFFFF  # keys of -FLT_MAX and FLT_MAX in csrc/include/d3s/top_share.hpp


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
    Every rank must call, with one backend; what moves is some small integer histograms, whatever n is.
    Returns [n] bool. Raises ValueError on every rank when any rank has NaN or an infinity.
    """
    mask = _select(scores, rho, uid, position, reduce, want_mask=True)[1]
    assert mask is not None
    return mask


def top_share_cut(scores: Tensor, rho: float, uid: Tensor, position: Tensor, reduce: Reduce | None = None) -> ShareCut:
    """The border of the same selection as `top_share`, without a mask."""
    return _select(scores, rho, uid, position, reduce, want_mask=False)[0]


def _select(
    scores: Tensor, rho: float, uid: Tensor, position: Tensor, reduce: Reduce | None, want_mask: bool
) -> tuple[ShareCut, Tensor | None]:
    require_vector("scores", scores, torch.float32)
    require_vector("uid", uid, torch.int64, scores)
    require_vector("position", position, torch.int64, scores)
    require(is_real(rho) and 0.0 <= rho <= 1.0, f"rho={rho}; pass a share from 0 to 1")
    reduce = reduce or _alone
    if isinstance(reduce, RankedReduce) and 1 < reduce.num_ranks <= FEW_RANKS and scores.device.type == "cpu":
        sizes = torch.zeros(reduce.num_ranks, dtype=torch.int64)
        sizes[reduce.rank] = len(scores)
        if int(reduce(sizes, "sum").sum()) <= FEW_SCORES:
            cut = gathered_cut(scores, rho, uid, position, reduce, sizes)
            return cut, cut.mask(scores, uid, position) if want_mask else None
    ext = extension.module()
    if ext is not None and scores.device.type == "cpu":
        return fast_select(ext, scores.contiguous(), rho, uid.contiguous(), position.contiguous(), reduce, want_mask)
    kernels = cuda_kernels(ext, scores)
    if kernels is not None:
        return device_select(
            kernels, scores.contiguous(), rho, uid.contiguous(), position.contiguous(), reduce, want_mask
        )
    cut = reference_cut(scores, rho, uid, position, reduce)
    return cut, cut.mask(scores, uid, position) if want_mask else None


def _alone(tensor: Tensor, how: str) -> Tensor:
    return tensor


def refuse_not_finite(num_nan: int, num_inf: int, n: int) -> None:
    """Raise ValueError where any of the n scores of all ranks is NaN or infinite."""
    require(
        num_nan == 0 and num_inf == 0,
        f"scores hold {num_nan} NaN and {num_inf} infinite values among {n} on all ranks; look at the log-probs "
        "and advantages they were made of",
    )


# ---- the search that both backends share ----


class Undecided(Protocol):
    """This rank's values among which the nth is still to be found; int64, ascending."""

    def ends(self) -> Tensor:
        """[-1 - smallest, largest], int64: one "max" reduction gives both ends over the ranks."""

    def counts(self, first: int, shift: int, num_bins: int) -> Tensor:
        """[num_bins] int64: how many values v have (v - first) >> shift equal to 0, 1, ..."""

    def narrow(self, first: int, last: int) -> None:
        """Keep the values from first to last."""


def nth_of_all(
    values: Undecided, nth: int, total: int, reduce: Reduce, ends: tuple[int, int] | None = None
) -> tuple[int, int, int]:
    """The nth smallest (from 1) of all ranks' `total` values; its rank among its equals; how many equals it has.

    Rounds of 16 bytes for the ends and 16 KB for a histogram; the ends skip the bits that all values share. `ends`
    are bounds that every rank already knows.
    """
    while True:
        if ends is None:
            low, high = reduce(values.ends(), "max").tolist()
            low = -1 - low
        else:
            (low, high), ends = ends, None
        if low == high:
            return low, nth, total
        shift = max(0, (high - low).bit_length() - DIGIT)
        counts = reduce(values.counts(low, shift, ((high - low) >> shift) + 1), "sum")
        up_to = counts.cumsum(0)
        digit = int(torch.searchsorted(up_to, nth))
        total = int(counts[digit])
        nth -= int(up_to[digit]) - total
        values.narrow(low + (digit << shift), min(high, low + ((digit + 1) << shift) - 1))


# ---- the reference ----


class TensorValues:
    """`Undecided` over a torch tensor."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def ends(self) -> Tensor:
        if len(self.values) == 0:
            return torch.full((2,), -LAST - 1, dtype=torch.int64, device=self.values.device)
        return torch.stack([-1 - self.values.min(), self.values.max()])

    def counts(self, first: int, shift: int, num_bins: int) -> Tensor:
        # the difference may pass 2^63 and wrap; as unsigned it is right, so the shift must not copy the sign
        digits = (self.values - first) >> shift
        if shift > 0:
            digits &= (1 << (64 - shift)) - 1
        return torch.bincount(digits, minlength=num_bins)

    def narrow(self, first: int, last: int) -> None:
        self.values = self.values[(self.values >= first) & (self.values <= last)]


def reference_cut(scores: Tensor, rho: float, uid: Tensor, position: Tensor, reduce: Reduce) -> ShareCut:
    """Torch reference of `top_share_cut`: radix selection over the float's bits, then over uid, then position."""
    counts = torch.stack([torch.tensor(len(scores), device=scores.device), scores.isnan().sum(), scores.isinf().sum()])
    n, num_nan, num_inf = reduce(counts, "sum").tolist()
    refuse_not_finite(num_nan, num_inf, n)
    k = num_top(rho, n)
    if k == 0:
        return ShareCut(math.inf, LAST, LAST, 0, 0)
    bits = (scores + 0.0).view(torch.int32)  # + 0.0: minus zero ties with zero
    keys = ~torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()  # the order of the floats, turned: highest first
    key, ties_kept, num_ties = nth_of_all(TensorValues(keys), k, n, reduce)
    threshold = torch.tensor(~key if key < 0 else ~key ^ 0x7FFFFFFF, dtype=torch.int32).view(torch.float32).item()
    if ties_kept == num_ties:
        return ShareCut(threshold, LAST, LAST, k, n)
    tied = keys == key
    tie_uid, left, num_same = nth_of_all(TensorValues(uid[tied]), ties_kept, num_ties, reduce)
    if left == num_same:
        return ShareCut(threshold, tie_uid, LAST, k, n)
    tied &= uid == tie_uid
    tie_position, _, _ = nth_of_all(TensorValues(position[tied]), left, num_same, reduce)
    return ShareCut(threshold, tie_uid, tie_position, k, n)


def gathered_cut(
    scores: Tensor, rho: float, uid: Tensor, position: Tensor, reduce: RankedReduce, sizes: Tensor
) -> ShareCut:
    """The same of a batch so small that one reduction may hold it: every rank ranks all; sizes [ranks] int64."""
    rows = torch.zeros(3, int(sizes.sum()), dtype=torch.int64)
    start = int(sizes[: reduce.rank].sum())
    mine = [(scores + 0.0).view(torch.int32).long(), uid, position]
    rows[:, start : start + len(scores)] = torch.stack(mine)
    bits, uids, positions = reduce(rows, "sum")
    all_scores = bits.int().view(torch.float32)
    refuse_not_finite(int(all_scores.isnan().sum()), int(all_scores.isinf().sum()), len(bits))
    k = num_top(rho, len(bits))
    if k == 0:
        return ShareCut(math.inf, LAST, LAST, 0, 0)
    order = positions.argsort(stable=True)
    order = order[uids[order].argsort(stable=True)]
    order = order[all_scores[order].argsort(stable=True, descending=True)]
    at, after = order[k - 1], order[k : k + 1]  # the last that is kept, the first that is not
    same_score = bool((all_scores[after] == all_scores[at]).any())
    same_uid = same_score and bool((uids[after] == uids[at]).any())
    tie_uid, tie_position = int(uids[at]) if same_score else LAST, int(positions[at]) if same_uid else LAST
    return ShareCut(float(all_scores[at]), tie_uid, tie_position, k, len(bits))


# ---- the compiled path ----


class CompiledValues:
    """`Undecided` inside the compiled selector, which holds what level of (key, uid, position) is looked at."""

    def __init__(self, selector: Any) -> None:
        self.selector = selector

    def ends(self) -> Tensor:
        out = torch.zeros(2, dtype=torch.int64)
        self.selector.ends(out)
        return out

    def counts(self, first: int, shift: int, num_bins: int) -> Tensor:
        out = torch.zeros(num_bins, dtype=torch.int64)
        self.selector.counts(first, shift, out)
        return out

    def narrow(self, first: int, last: int) -> None:
        self.selector.narrow(first, last)


def fast_select(
    ext: ModuleType, scores: Tensor, rho: float, uid: Tensor, position: Tensor, reduce: Reduce, want_mask: bool
) -> tuple[ShareCut, Tensor | None]:
    """The same selection with one read of the scores: a bracket from a sample holds the border almost surely.

    The bracket only says what is looked at; a miss costs a second read, never a wrong pick.
    """
    top = ext.TopShare(scores, uid, position, torch.get_num_threads())
    mask = _empty_mask(len(scores)) if want_mask else None
    found = torch.zeros(2 + SAMPLE_BINS, dtype=torch.int64)
    here = len(scores)
    size = top.sample(found[2:])
    found[0], found[1] = here, here * here // size if size < here else 0
    reduce(found, "sum")
    n, spread = int(found[0]), int(found[1])
    k = num_top(rho, n)
    if n == 0:
        return ShareCut(math.inf, LAST, LAST, 0, 0), mask
    low, high = _bracket(top, found[2:], k / n, n, spread, reduce)
    counts = torch.zeros(3, dtype=torch.int64)
    top.split(low, high, mask, counts)
    above, inside, broken = reduce(counts, "sum").tolist()
    if broken:
        bad = torch.zeros(2, dtype=torch.int64)
        top.count_broken(bad)
        num_nan, num_inf = reduce(bad, "sum").tolist()
        refuse_not_finite(num_nan, num_inf, n)
    if not above < k <= above + inside:
        counts.zero_()
        top.split(LEAST_KEY, LARGEST_KEY, mask, counts)
        above, inside, low, high = 0, n, LEAST_KEY, LARGEST_KEY
    values = CompiledValues(top)
    top.look_at_keys()
    key, ties_kept, num_ties = nth_of_all(values, k - above, inside, reduce, (~high, ~low))
    key = ~key
    tie_uid = tie_position = LAST
    if ties_kept < num_ties:
        top.look_at_uids(key)
        tie_uid, left, num_same = nth_of_all(values, ties_kept, num_ties, reduce)
        if left < num_same:
            top.look_at_positions(tie_uid)
            tie_position, _, _ = nth_of_all(values, left, num_same, reduce)
    if mask is not None:
        top.write(key, tie_uid, tie_position)
    return ShareCut(ext.score_of(key), tie_uid, tie_position, k, n), mask


def _empty_mask(n: int) -> Tensor:
    """[n] bool; a large one begins and ends with a large page: its edges alone would be hundreds of small ones."""
    if n < LARGE_MASK:
        return torch.empty(n, dtype=torch.bool)
    whole = torch.empty(n + 2 * LARGE_PAGE, dtype=torch.bool)
    start = -whole.data_ptr() % LARGE_PAGE
    return whole[start : start + n]


def _bracket(top: Any, counts: Tensor, share: float, n: int, spread: int, reduce: Reduce) -> tuple[int, int]:
    """Keys [low, high] that hold the border of the share almost surely: 22 bits of each, in two digits.

    spread: sum over ranks of (its scores)^2 / (its sample); times share (1 - share) it is the variance of the count
    that the weighted samples say is above the border.
    """
    if n <= BRACKET_ABOVE:
        return LEAST_KEY, LARGEST_KEY
    weight = int(counts.sum())
    slack = SIGMAS * math.sqrt(share * (1 - share) * spread) / n + 4 * spread / n**2
    # descending: how much of the sample's weight lies above the upper and the lower end of the bracket
    above = [max(0.0, share - slack) * weight, min(1.0, share + slack) * weight]

    def digit_at(descending: Tensor, target: float) -> tuple[int, int]:
        up_to = descending.flip(0).cumsum(0)
        at = min(int(torch.searchsorted(up_to, int(target) + 1)), len(up_to) - 1)
        return len(up_to) - 1 - at, int(up_to[at - 1]) if at else 0

    high, before_high = digit_at(counts, above[0])
    low, before_low = digit_at(counts, above[1])
    finer = torch.zeros(2 * SAMPLE_BINS, dtype=torch.int64)
    top.refine(low, high, finer)
    reduce(finer, "sum")
    low_next, _ = digit_at(finer[:SAMPLE_BINS], above[1] - before_low)
    high_next, _ = digit_at(finer[SAMPLE_BINS:], above[0] - before_high)
    low_key = ((low << DIGIT) | low_next) << (32 - 2 * DIGIT)
    high_key = (((high << DIGIT) | high_next) + 1 << (32 - 2 * DIGIT)) - 1
    if above[0] <= 0:
        high_key = LARGEST_KEY
    if above[1] >= weight:
        low_key = LEAST_KEY
    return max(low_key, LEAST_KEY), min(high_key, LARGEST_KEY)


# ---- on a GPU ----


def device_select(
    kernels: Any, scores: Tensor, rho: float, uid: Tensor, position: Tensor, reduce: Reduce, want_mask: bool
) -> tuple[ShareCut, Tensor | None]:
    """The same selection with its state on the device: one look back at the count, one at the result."""
    n = int(reduce(torch.tensor([len(scores)], device=scores.device), "sum"))
    k = num_top(rho, n)
    mask = torch.zeros(len(scores), dtype=torch.bool, device=scores.device) if want_mask else None
    if n == 0:
        return ShareCut(math.inf, LAST, LAST, 0, 0), mask
    state = select_share(kernels, scores, uid, position, k, n, reduce, mask)
    key, tie_uid, tie_position, _, _, done, num_nan, num_inf = state.tolist()
    refuse_not_finite(num_nan, num_inf, n)
    order = ~key & 0xFFFFFFFF  # ascending keys of the floats, as in csrc/include/d3s/top_share.hpp
    bits = order ^ 0x80000000 if order >> 31 else ~order & 0xFFFFFFFF
    threshold = torch.tensor(bits - (bits >> 31 << 32), dtype=torch.int32).view(torch.float32).item()
    sign = 1 << 63  # uid and position are kept with their sign bit turned, so that unsigned order is theirs
    tie_uid = LAST if done == 1 else (tie_uid % (1 << 64) ^ sign) - ((tie_uid % (1 << 64) ^ sign) >> 63 << 64)
    tie_position %= 1 << 64
    tie_position = LAST if done in (1, 2) else (tie_position ^ sign) - ((tie_position ^ sign) >> 63 << 64)
    return ShareCut(threshold, tie_uid, tie_position, k, n), mask
