"""Integer packing: lengths into bins of a capacity, and into parts of even sums; the same answer everywhere."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from d3s_megatron.ops import extension
from d3s_megatron.ops.checks import is_whole, require

MOST_PARTS = 1 << 20
INT64 = (1 << 63) - 1


def first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Put each length, in order, into the first bin it fits: bins of indices, no bin's sum above capacity.

    Raises ValueError for a length that no bin can hold. At most 1.7 times the fewest bins (Garey et al. 1972).
    """
    require(is_whole(capacity), f"capacity={capacity}; pass what a bin holds, an integer")
    _require_lengths(lengths, capacity, f"a bin holds 0 to {capacity}")
    ext = extension.module()
    if ext is None:
        return reference_first_fit(lengths, capacity)
    capacity = min(int(capacity), sum(lengths))  # no bin holds more
    bin_of = torch.zeros(len(lengths), dtype=torch.int64)
    num_bins = ext.first_fit(torch.tensor(lengths, dtype=torch.int64), capacity, bin_of)
    return _lists(bin_of, num_bins)


def _require_lengths(lengths: Sequence[int], most: float, remedy: str) -> None:
    """Raise ValueError unless every length is an integer from 0 to `most` and their sum is one of 64 bits."""
    plain = set(map(type, lengths)) <= {int}  # as a step's are: one look at all of them, not one at each
    if not (plain and 0 <= min(lengths, default=0) and max(lengths, default=0) <= most):
        for at, length in enumerate(lengths):
            require(is_whole(length) and 0 <= length <= most, f"lengths[{at}]={length}; {remedy}")
    total = sum(lengths)
    require(total <= INT64, f"lengths add up to {total}; the sum must stay below 2^63")


def _lists(part: Tensor, num: int) -> list[list[int]]:
    lists: list[list[int]] = [[] for _ in range(num)]
    for i, p in enumerate(part.tolist()):
        lists[p].append(i)
    return lists


def reference_first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """The bins of `first_fit`, for lengths that were checked."""
    bins: list[list[int]] = []
    # A tree of the largest room below each node finds the first bin in log time; leaf b is bin b.
    size = 1
    while size < max(1, len(lengths)):
        size *= 2
    room = [capacity] * (2 * size)
    for at, length in enumerate(lengths):
        node = 1
        while node < size:
            node = 2 * node if room[2 * node] >= length else 2 * node + 1
        if node - size == len(bins):
            bins.append([])
        bins[node - size].append(at)
        room[node] -= length
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return bins


def balanced_partition(lengths: Sequence[int], num_parts: int, *, equal_count: bool = False) -> list[list[int]]:
    """Split indices into num_parts lists with sums as even as the largest differencing method makes them.

    With equal_count every list has len(lengths) / num_parts indices. Lists are ascending, and ordered by their
    smallest index, empty ones last. Karmarkar and Karp (1982); ties fall by index, so every rank gets the same lists.
    Raises ValueError where num_parts < 1, a length is negative, or equal counts are asked for and cannot be.
    """
    require(is_whole(num_parts) and 1 <= num_parts <= MOST_PARTS, f"num_parts={num_parts}; pass 1 to {MOST_PARTS}")
    num = len(lengths)
    _require_lengths(lengths, math.inf, "lengths are 0 or more")
    require(
        not equal_count or num % num_parts == 0,
        f"{num} lengths cannot be split into {num_parts} lists of equal count; pad them or drop equal_count",
    )
    ext = extension.module()
    if ext is not None:
        part = torch.zeros(num, dtype=torch.int64)
        ext.balanced_partition(torch.tensor(lengths, dtype=torch.int64), num_parts, equal_count, part)
        lists = _lists(part, num_parts)
    else:
        lists = reference_partition(lengths, num_parts, num_parts if equal_count else 1)
    return sorted(lists, key=lambda members: (not members, members[:1]))


def reference_partition(lengths: Sequence[int], num_parts: int, group: int) -> list[list[int]]:
    """The lists of `balanced_partition`, each ascending, in no set order; group: num_parts for equal counts, else 1."""
    num = len(lengths)
    order = sorted(range(num), key=lambda i: (-lengths[i], i))
    # A state is num_parts lists with their sums, largest first; the two most uneven states are merged,
    # the largest of one with the smallest of the other, until one is left.
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for serial, start in enumerate(range(0, num, group)):
        parts = [(int(lengths[i]), [i]) for i in order[start : start + group]]
        parts += [(0, []) for _ in range(num_parts - len(parts))]
        heap.append((parts[-1][0] - parts[0][0], serial, parts))
    heapq.heapify(heap)
    serial = len(heap)
    while len(heap) > 1:
        _, _, a = heapq.heappop(heap)
        _, _, b = heapq.heappop(heap)
        merged = [(x[0] + y[0], x[1] + y[1]) for x, y in zip(a, reversed(b), strict=True)]
        merged.sort(key=lambda part: -part[0])  # stable: equal sums keep their places
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], serial, merged))
        serial += 1
    parts = heap[0][2] if heap else [(0, []) for _ in range(num_parts)]
    return [sorted(members) for _, members in parts]
