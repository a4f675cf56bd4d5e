"""Faults that people met in this kind of work, put in on purpose to see that the doctor finds and names them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from d3s_megatron import ops, stages
from d3s_megatron.actor import megatron_actor, passes
from d3s_megatron.algorithms.normalization import kept_counts

_PLACES: dict[str, tuple[Any, str]] = {
    "plain-all-reduce": (ops, "logprob_entropy"),
    "padded-columns": (ops, "logprob_entropy"),
    "per-rank-count": (stages, "token_weights"),
    "rolled-labels": (megatron_actor, "pack"),
    "context-sum": (passes, "gather_scored"),
}


def _plain_all_reduce(right: Callable) -> Callable:
    """The right value; but ranks without the target mask their whole log-prob, so their shard learns nothing of it."""

    def broken(logits, targets, *, temperature, vocab_size, tp_group, overwrite_logits):
        _, entropy = right(logits.detach(), targets, temperature=temperature, vocab_size=vocab_size, tp_group=tp_group)
        width = logits.shape[1]
        first = dist.get_rank(tp_group) * width
        scaled = logits.float() / temperature
        padding = torch.arange(first, first + width, device=logits.device) >= vocab_size
        scaled = scaled.masked_fill(padding, -torch.inf)
        top = scaled.detach().amax(1)
        dist.all_reduce(top, dist.ReduceOp.MAX, group=tp_group)
        log_z = _sum(torch.exp(scaled - top[:, None]).sum(1), tp_group).log() + top
        owned = (targets >= first) & (targets < first + width)
        at = (targets - first).clamp(0, width - 1)[:, None]
        return _sum(torch.where(owned, scaled.gather(1, at)[:, 0] - log_z, 0.0), tp_group), entropy

    return broken


def _sum(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the ranks; backward knows of this rank's part only, as behind a plain all_reduce."""
    total = values.detach().clone()
    dist.all_reduce(total, group=group)
    return values + (total - values.detach())


def _padded_columns(right: Callable) -> Callable:
    """The vocabulary's padding takes part in the softmax."""
    return lambda *args, **kwargs: right(*args, **{**kwargs, "vocab_size": None})


def _per_rank_count(right: Callable) -> Callable:
    """Every rank divides by its own number of tokens."""
    return lambda kind, keep, max_length, counts: right(kind, keep, max_length, kept_counts(keep))


def _rolled_labels(right: Callable) -> Callable:
    """Labels are the row shifted by one, so that the last label of a sample comes from the next one."""

    def broken(*args, **kwargs):
        rows = right(*args, **kwargs)
        return [replace(row, targets=row.token_ids.roll(-1)[row.rows]) for row in rows]

    return broken


class _Sum(torch.autograd.Function):
    """The identity, with a backward that sums over the ranks."""

    @staticmethod
    def forward(ctx, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return values.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def _context_sum(right: Callable) -> Callable:
    """Context-parallel ranks sum the gradient of the gathered log-probs, of which each has the whole already."""
    return lambda own, scored, num, group: _Sum.apply(right(own, scored, num, group), group)


FAULTS: dict[str, Callable[[Callable], Callable]] = {
    "plain-all-reduce": _plain_all_reduce,
    "padded-columns": _padded_columns,
    "per-rank-count": _per_rank_count,
    "rolled-labels": _rolled_labels,
    "context-sum": _context_sum,
}


@contextlib.contextmanager
def injected(name: str | None) -> Iterator[None]:
    """Runs what is inside with the fault of that name; None runs it as it is."""
    if name is None:
        yield
        return
    place, attribute = _PLACES[name]
    right = getattr(place, attribute)
    setattr(place, attribute, FAULTS[name](right))
    try:
        yield
    finally:
        setattr(place, attribute, right)
