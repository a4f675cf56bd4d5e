"""Tiny batches for the method's parts, and a world of ranks made of threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from threading import Barrier
from typing import Any

import torch
from torch import Tensor

from d3s_megatron.types import Experience, LossBatch, Reduce, Sample, Scores

NAN = float("nan")


def experience(groups: Sequence[Sequence[float]], seed: int = 0, step: int = 0) -> Experience:
    """One list of rewards per group; uids count through them, response lengths are 1, 2, 3, ..."""
    rewards = torch.tensor([r for group in groups for r in group], dtype=torch.float64)
    group_ids = torch.tensor([g for g, group in enumerate(groups) for _ in group], dtype=torch.int64)
    return Experience.new(seed, step, group_ids, rewards, torch.arange(1, len(rewards) + 1))


def success(num_right: int, size: int = 8) -> list[float]:
    """A group of binary rewards, the right answers first."""
    return [1.0] * num_right + [0.0] * (size - num_right)


def kept_uids(batch: Experience) -> list[int]:
    return batch.uids[batch.kept].tolist()


def sample(uid: int, length: int, advantage: float = 1.0, prompt: int = 2) -> Sample:
    return Sample(uid, (1,) * prompt, tuple(range(length)), (-1.0,) * length, advantage)


def scores(entropy: Sequence[float], old: Sequence[float] | None = None, ref: Sequence[float] | None = None) -> Scores:
    return Scores(
        old_log_probs=torch.tensor(old if old is not None else [-1.0] * len(entropy)),
        entropy=torch.tensor(entropy),
        ref_log_probs=None if ref is None else torch.tensor(ref),
    )


def loss_batch(
    old: Sequence[float],
    advantages: Sequence[float],
    sequence: Sequence[int],
    weights: Sequence[float] | None = None,
    keep: Sequence[bool] | None = None,
    ref: Sequence[float] | None = None,
    kl_weights: Sequence[float] | None = None,
    dtype: torch.dtype = torch.float64,
) -> LossBatch:
    """A LossBatch of plain lists; weights are 1 and everything is kept unless given."""

    def tensor(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=dtype)

    ones = [1.0] * len(old)
    weights = ones if weights is None else weights
    return LossBatch(
        old_log_probs=tensor(old),
        rollout_log_probs=tensor(old),
        ref_log_probs=None if ref is None else tensor(ref),
        advantages=tensor(advantages),
        keep=torch.tensor([True] * len(old) if keep is None else keep, dtype=torch.bool),
        weights=tensor(weights),
        kl_weights=tensor(weights if kl_weights is None else kl_weights),
        sequence=torch.tensor(sequence, dtype=torch.int64),
        num_sequences=max(sequence, default=0) + 1,
    )


def alone(tensor: Tensor, how: str) -> Tensor:
    """The Reduce of a world of one."""
    return tensor


def in_ranks(parts: Sequence[Any], work: Callable[[Any, Reduce], Any]) -> list[Any]:
    """work(part, reduce) for every part at once, each rank a thread that meets the others in every reduction."""
    barrier, board = Barrier(len(parts)), [torch.zeros(0)] * len(parts)

    def rank(r: int) -> Any:
        def reduce(tensor: Tensor, how: str) -> Tensor:
            board[r] = tensor.clone()
            barrier.wait(1200)
            everyone = torch.stack(board)
            tensor.copy_({"sum": everyone.sum, "max": everyone.amax, "min": everyone.amin}[how](0))
            barrier.wait(1200)
            return tensor

        return work(parts[r], reduce)

    with ThreadPoolExecutor(len(parts)) as pool:
        return [job.result() for job in [pool.submit(copy_context().run, rank, r) for r in range(len(parts))]]
