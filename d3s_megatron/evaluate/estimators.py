"""Estimates from n answers a problem: pass@k, maj@k, and bootstrap intervals over the problems.

Both estimators are exact means over all C(n, k) ways to draw k of the n answers, in whole numbers up to the last
division, so that no random number and no order of summation is in them.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from d3s_megatron.ops import mix64

NUM_BOOTSTRAP = 2000
CONFIDENCE = 0.95
_ELEMENTS_AT_ONCE = 1 << 22  # of drawn values; bounds the memory of a bootstrap over a large set


@dataclass(frozen=True)
class Estimate:
    """A mean over problems with the ends of its bootstrap interval."""

    value: float
    low: float
    high: float


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Probability that k of n samples, drawn without replacement, hold a correct one: 1 - C(n-c, k) / C(n, k).

    Source: Chen et al. 2021 (arXiv 2107.03374), section 2.1; method 4, row 25. Raises ValueError unless 1 <= k <= n.
    """
    _check_k(k, num_samples)
    assert 0 <= num_correct <= num_samples, (num_correct, num_samples)
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def pass_at_first_k(solved: Sequence[bool | None], k: int) -> float:
    """1 where any of the first k samples is correct, else 0: the other reading of pass@k (method 4, row 25)."""
    return float(any(solved[:k]))


def maj_at_k(votes: Sequence[Hashable | None], solved: Sequence[bool | None], k: int) -> float:
    """Probability that the most frequent answer among k of n samples, drawn without replacement, is right.

    Equal `votes` are the same answer; None does not vote, and a draw without any vote is not right. Of answers drawn
    equally often the one that comes first among the n samples wins. An answer is right where `solved` says so for its
    first sample with a verdict (None is none). Raises ValueError unless 1 <= k <= n.
    """
    num = len(votes)
    _check_k(k, num)
    counts = Counter(vote for vote in votes if vote is not None)  # in the order of first appearance
    verdicts: dict[Hashable, bool] = {}
    for vote, verdict in zip(votes, solved, strict=True):
        if vote is not None and verdict is not None:
            verdicts.setdefault(vote, bool(verdict))
    sizes, num_silent = list(counts.values()), num - counts.total()
    won = sum(_draws_won(sizes, place, num_silent, k) for place, vote in enumerate(counts) if verdicts.get(vote, False))
    return won / math.comb(num, k)


def _check_k(k: int, num_samples: int) -> None:
    if not 1 <= k <= num_samples:
        raise ValueError(f"k is {k} with {num_samples} samples: give 1 <= k <= samples")


def _draws_won(sizes: Sequence[int], place: int, num_silent: int, k: int) -> int:
    """How many draws of k have the answer at `place` as their winner.

    With m samples of the winner, each earlier answer may have m - 1 at most and each later one m: the number of such
    draws is a coefficient of a product of cut-off binomials. Polynomials are whole numbers in base 2**bits.
    """
    num = sum(sizes) + num_silent
    bits = math.comb(num, num // 2).bit_length()  # no coefficient of the product is larger
    silent = _binomials(num_silent, num_silent, bits)
    won = 0
    for m in range(1, min(sizes[place], k) + 1):
        product = silent
        for other, size in enumerate(sizes):
            if other != place:
                product *= _binomials(size, min(size, m - (other < place)), bits)
        others = product >> (bits * (k - m)) & ((1 << bits) - 1)
        won += math.comb(sizes[place], m) * others
    return won


@functools.lru_cache(maxsize=4096)
def _binomials(num: int, most: int, bits: int) -> int:
    return sum(math.comb(num, i) << (bits * i) for i in range(most + 1))


def resampled_means(values: Tensor, seed: int, name: str, num: int = NUM_BOOTSTRAP) -> Tensor:
    """Means [..., num] float64 of bootstrap draws of the problems' values [..., P].

    The draws are a function of (seed, name, P), so that columns of one set are resampled together.
    """
    num_problems = values.shape[-1]
    salt = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    rows = max(1, _ELEMENTS_AT_ONCE // values.numel())
    means = []
    for part in torch.arange(num).split(rows):
        keys = mix64(seed, salt, part[:, None], torch.arange(num_problems)[None])
        uniforms = (keys >> 11 & ((1 << 53) - 1)).double() * 2.0**-53
        means.append(values.double()[..., (uniforms * num_problems).long()].mean(-1))
    return torch.cat(means, -1)


def estimate(value: float, means: Tensor, confidence: float = CONFIDENCE) -> Estimate:
    """`value` with the percentile interval of its resampled means [num]."""
    ordered = means.sort().values
    outside = round(len(ordered) * (1 - confidence) / 2)  # draws beyond either end
    return Estimate(value, float(ordered[outside]), float(ordered[-1 - outside]))
