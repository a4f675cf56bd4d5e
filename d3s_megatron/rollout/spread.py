"""Shares the prompts of a step out over the engines of a job by the length of the answers they expect.

A step's rollouts take as long as its busiest engine. Answers do not depend on who gives them (a seed per request), so
the shares may follow the lengths.
"""

from __future__ import annotations

import base64
import heapq
import math
import zlib
from collections.abc import Sequence

import numpy as np


class PromptLengths:
    """Mean answer length of every prompt of the data when it was last answered; the same on every rank.

    Kept with a checkpoint as text, so that a resumed run shares out as it would have.
    """

    def __init__(self, num_prompts: int, saved: str = "") -> None:
        """`saved` is what `as_text` gave; it is left out where it is of another number of prompts."""
        self._lengths = np.full(num_prompts, np.nan, dtype=np.float32)  # NaN was never answered
        before = np.frombuffer(zlib.decompress(base64.b64decode(saved)), np.float32) if saved else self._lengths
        if len(before) == num_prompts:
            self._lengths[:] = before

    def add(self, prompts: Sequence[int], groups: Sequence[int], lengths: Sequence[int]) -> None:
        """The answers of a step.

        Args:
            prompts: [P] which prompts of the data the batch is of.
            groups: [N] slot in the batch of each answer's prompt.
            lengths: [N] response tokens of each answer.
        """
        num = np.bincount(groups, minlength=len(prompts))
        means = np.bincount(groups, weights=lengths, minlength=len(prompts)) / np.maximum(num, 1)
        self._lengths[np.asarray(prompts)[num > 0]] = means[num > 0]

    def expected(self, prompts: Sequence[int]) -> list[float]:
        """Tokens [P]; the mean over all known prompts for one that was never answered, 0 before any answer."""
        known = self._lengths[~np.isnan(self._lengths)]
        typical = float(known.mean(dtype=np.float64)) if len(known) else 0.0
        return [typical if math.isnan(one) else float(one) for one in self._lengths[list(prompts)]]

    def as_text(self) -> str:
        """For a checkpoint; empty before any answer. About 2 bytes a prompt."""
        if np.isnan(self._lengths).all():
            return ""
        return base64.b64encode(zlib.compress(self._lengths.tobytes(), 1)).decode()


def spread(expected: Sequence[float], num_engines: int, ranks_per_engine: int = 1) -> list[list[int]]:
    """The prompts (indices into `expected`) of each rank, those that take longest first.

    Each goes, the longest first, to the engine that has least to do (R. L. Graham 1969: at most a third above the best
    plan). Where all are expected alike, the shares are contiguous and equal in number. Ranks that share an engine share
    its prompts.
    """
    num = len(expected)
    if len(set(expected)) <= 1:
        engines = [list(range(num * e // num_engines, num * (e + 1) // num_engines)) for e in range(num_engines)]
    else:
        engines = [[] for _ in range(num_engines)]
        loads = [(0.0, e) for e in range(num_engines)]
        for i in sorted(range(num), key=lambda i: (-expected[i], i)):
            load, e = heapq.heappop(loads)
            engines[e].append(i)
            heapq.heappush(loads, (load + expected[i], e))
    return [share[r::ranks_per_engine] for share in engines for r in range(ranks_per_engine)]
