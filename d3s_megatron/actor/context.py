"""Context parallelism: which tokens of a packed row each rank holds, and scored values from there to every rank.

Every sample is padded to a multiple of 2 * size and cut into 2 * size chunks; rank r holds chunks r and
2 * size - 1 - r of each, an early one and a late one, so that causal attention costs all ranks the same. It is the
partition of Transformer Engine's path for packed rows (its thd_get_partitioned_indices). Algorithms, stages and
packing know whole rows only: what is scored here comes back to every rank in the order of the whole row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from d3s_megatron.types import TokenBatch


def multiples(tp_size: int, cp_size: int, sequence_parallel: bool) -> tuple[int, int]:
    """(of every sample's length, of a row's length) in tokens, so that ranks get shares of one size."""
    of_samples = 2 * cp_size if cp_size > 1 else 1
    return of_samples, math.lcm(of_samples, cp_size * (tp_size if sequence_parallel else 1))


def own_positions(cu_seqlens: Tensor, rank: int, size: int) -> Tensor:
    """The positions [T / size] of a row with those borders that a rank holds, in the order in which it holds them."""
    if size == 1:
        return torch.arange(int(cu_seqlens[-1]))
    chunks = cu_seqlens.diff() // (2 * size)
    assert torch.equal(chunks * (2 * size), cu_seqlens.diff()), (cu_seqlens, size)
    starts = torch.stack([cu_seqlens[:-1] + part * chunks for part in parts_of(rank, size)], 1).flatten()
    lengths = chunks.repeat_interleave(2)
    offsets = torch.arange(int(lengths.sum())) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    return starts.repeat_interleave(lengths) + offsets


def parts_of(rank: int, size: int) -> tuple[int, ...]:
    """The chunks of every sample that a rank holds; the only one without context parallelism."""
    return (rank, 2 * size - 1 - rank) if size > 1 else (0,)


def places(cu_seqlens: Tensor, size: int) -> Tensor:
    """Where each position [T] of a row stands in the shares of all ranks, laid end to end."""
    return torch.cat([own_positions(cu_seqlens, rank, size) for rank in range(size)]).argsort()


@dataclass(frozen=True)
class Share:
    """What one rank holds of a row."""

    positions: Tensor  # [T / size] in the whole row
    rows: Tensor  # [S_own] scored rows, as indices into `positions`
    scored: Tensor  # [S_own] which of the row's scored positions these are, 0..S-1


def share_of(row: TokenBatch, rank: int, size: int) -> Share:
    """The share of a rank in a row whose samples are multiples of 2 * size."""
    positions = own_positions(row.cu_seqlens, rank, size)
    if size == 1:
        return Share(positions, row.rows, torch.arange(len(row.rows)))
    first = rank * len(positions)
    local = places(row.cu_seqlens, size)[row.rows] - first
    scored = ((local >= 0) & (local < len(positions))).nonzero().flatten()
    return Share(positions, local[scored], scored)


class _GatherScored(torch.autograd.Function):
    """Own columns to all columns on every rank; back, a rank takes the gradient of its own and of no other.

    Every rank computes the same loss from all columns, so the gradient that arrives is the whole one already: summed
    over the ranks it would be too large by their number.
    """

    @staticmethod
    def forward(ctx, own: Tensor, scored: Tensor, num_scored: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(scored)
        everyone = own.new_zeros(len(own), num_scored)
        everyone[:, scored] = own
        dist.all_reduce(everyone, group=group)  # one rank's value and zeros: exact
        return everyone

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (scored,) = ctx.saved_tensors
        return grad[:, scored], None, None, None


def gather_scored(own: Tensor, scored: Tensor, num_scored: int, group: dist.ProcessGroup) -> Tensor:
    """Values [k, S_own] of each rank's scored rows to those of the whole row [k, S], on every rank of the group."""
    if not num_scored:
        return own  # nobody holds any
    return _GatherScored.apply(own, scored, num_scored, group)
