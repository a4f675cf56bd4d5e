"""The exact top share of tokens over many ranks on one machine, one thread a rank; simulate_scale.py times it."""

from __future__ import annotations

import gc
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from d3s_megatron.algorithms.token_selection import TopShare
from d3s_megatron.types import Sample, Scores

ANSWER = 4096  # response tokens of a made-up sample, the median of real ones here


def timed(act: Callable[[], Any]) -> tuple[Any, float]:
    """What it gives, and processor seconds of this thread."""
    start = time.thread_time()
    out = act()
    return out, time.thread_time() - start


class ThreadReduce:
    """A real `Reduce` between threads, one a rank; counts rounds and bytes of one rank.

    A thread computes while it holds `turn`, as if it had a core of its own; waiting for Python's lock among a thousand
    threads takes processor time, which would count as the rank's.
    """

    def __init__(self, ranks: int) -> None:
        self._barrier, self._lock, self.turn = threading.Barrier(ranks), threading.Lock(), threading.Lock()
        self._total: Tensor | None = None
        self.rounds, self.num_bytes = 0, 0
        self._own = threading.local()

    def seconds_inside(self) -> float:
        """Processor seconds that this thread spent here: the cost of threads, no part of a selection."""
        return getattr(self._own, "seconds", 0.0)

    def __call__(self, tensor: Tensor, how: str) -> Tensor:
        _, seconds = timed(lambda: self._reduce(tensor, how))
        self._own.seconds = self.seconds_inside() + seconds
        return tensor

    def _reduce(self, tensor: Tensor, how: str) -> None:
        self.turn.release()
        try:
            self._meet(tensor, how)
        finally:
            self.turn.acquire()

    def _meet(self, tensor: Tensor, how: str) -> None:
        with self._lock:
            if self._total is None:
                self._total = tensor.clone()
                self.rounds, self.num_bytes = self.rounds + 1, self.num_bytes + tensor.nbytes
            elif how == "sum":
                self._total += tensor
            else:
                (torch.maximum if how == "max" else torch.minimum)(self._total, tensor, out=self._total)
        self._barrier.wait()
        assert self._total is not None
        tensor.copy_(self._total)
        if self._barrier.wait() == 0:  # all have read
            self._total = None
        self._barrier.wait()


@dataclass(frozen=True)
class TopShareRun:
    """One exact selection over shards of real size, one thread a rank."""

    ranks: int
    num_scores: int
    num_kept: int
    rounds: int
    num_bytes: int  # of one rank's histograms, one way
    slowest: float  # processor seconds of a rank
    mean: float


def run_top_share(num_scores: int, ranks: int, share: float, seed: int) -> TopShareRun:
    """Token selection over about `num_scores` made-up scores; AssertionError unless exactly k are kept over all."""
    each = max(1, num_scores // ranks)
    lengths = [min(ANSWER, each - start) for start in range(0, each, ANSWER)]
    select, reduce, spent, kept = TopShare(), ThreadReduce(ranks), [0.0] * ranks, [0] * ranks
    failed: list[BaseException] = []

    def one_rank(rank: int) -> None:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + rank)
        samples, scores = [], []
        for i, length in enumerate(lengths):
            # Entropies as a model's: most near 0, a long tail, some equal. Of the ids only their number counts.
            entropy = torch.rand(length, generator=generator).pow_(4).mul_(4096).round_().div_(1024)
            entropy += torch.rand(length, generator=generator).round_() * 1e-3
            advantage = (i % 7 - 2) / 3
            samples.append(Sample(rank * len(lengths) + i, (), range(length), (), advantage))  # type: ignore[arg-type]
            scores.append(Scores(entropy, entropy, None))
        masks, seconds = timed(lambda: select(samples, scores, share, seed, 0, reduce))
        spent[rank] = seconds - reduce.seconds_inside()
        kept[rank] = sum(int(mask.sum()) for mask in masks)

    def in_turn(rank: int) -> None:
        try:
            with reduce.turn:
                one_rank(rank)
        except threading.BrokenBarrierError:
            pass  # another rank's failure is the cause, and it is raised below
        except BaseException as wrong:
            failed.append(wrong)
            reduce._barrier.abort()

    threads = [threading.Thread(target=in_turn, args=(rank,)) for rank in range(ranks)]
    gc.disable()  # it would look through all ranks' objects in one rank's time
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.enable()
    if failed:
        raise failed[0]
    total = each * ranks
    assert sum(kept) == min(total, max(1, math.ceil(share * total - 1e-9))), (sum(kept), total)
    return TopShareRun(ranks, total, sum(kept), reduce.rounds, reduce.num_bytes, max(spent), sum(spent) / ranks)
