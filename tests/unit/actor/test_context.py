"""Shares of a packed row: the partition of Transformer Engine, and scored rows that come together again."""

import torch
from builders import random_samples
from helpers import check_packing
from hypothesis import given, settings
from hypothesis import strategies as st

from d3s_megatron.actor.attention import attend, pack_row
from d3s_megatron.actor.context import multiples, own_positions, places, share_of
from d3s_megatron.actor.packing import empty_row, pack, same_length


def as_transformer_engine_has_it(cu_seqlens, rank, size):
    """Its thd_get_partitioned_indices, token by token: the borders of a share, then in which half a token stands."""
    borders = [border // size for border in cu_seqlens]
    found = []
    for start, end, first in zip(borders, borders[1:], cu_seqlens, strict=False):
        half = (end - start) // 2
        for index in range(end - start):
            part = rank if index < half else 2 * (size - 1) - rank
            found.append(first + index + part * half)
    return found


@settings(max_examples=40, deadline=None)
@given(chunks=st.lists(st.integers(1, 9), min_size=1, max_size=6), size=st.integers(2, 5))
def test_a_row_is_cut_as_transformer_engine_cuts_it(chunks, size):
    cu_seqlens = torch.tensor([0, *chunks]).cumsum(0) * 2 * size
    shares = [own_positions(cu_seqlens, rank, size) for rank in range(size)]
    for rank, positions in enumerate(shares):
        assert positions.tolist() == as_transformer_engine_has_it(cu_seqlens.tolist(), rank, size)
    everything = torch.cat(shares)
    assert sorted(everything.tolist()) == list(range(int(cu_seqlens[-1])))
    assert torch.equal(everything[places(cu_seqlens, size)], torch.arange(len(everything)))


@settings(max_examples=40, deadline=None)
@given(
    num=st.integers(0, 20),
    seed=st.integers(0, 9),
    max_tokens=st.integers(1, 60),
    tp=st.sampled_from([1, 2, 3]),
    cp=st.sampled_from([1, 2, 3, 4]),
    sequence_parallel=st.booleans(),
)
def test_every_scored_position_is_in_one_share(num, seed, max_tokens, tp, cp, sequence_parallel):
    samples = random_samples(num, seed)
    of_samples, of_rows = multiples(tp, cp, sequence_parallel)
    assert of_rows % (cp * (tp if sequence_parallel else 1)) == 0 and (cp == 1 or of_samples == 2 * cp)
    rows = pack(samples, max_tokens, of_rows, share_prompts=False, sample_multiple=of_samples)
    check_packing(samples, rows, max_tokens + of_samples, of_rows, of_samples)
    for row in same_length([*rows, empty_row(of_rows)], of_samples):
        found = torch.full((len(row.rows),), -1)
        for rank in range(cp):
            share = share_of(row, rank, cp)
            assert len(share.positions) * cp == len(row.token_ids)
            assert (found[share.scored] == -1).all()
            found[share.scored] = share.positions[share.rows]
        assert torch.equal(found, row.rows)


@settings(max_examples=30, deadline=None)
@given(
    chunks=st.lists(st.integers(1, 7), min_size=1, max_size=6),
    size=st.sampled_from([2, 3, 4]),
    groups=st.sampled_from([1, 2]),
)
def test_a_share_attends_as_the_whole_row_does(chunks, size, groups):
    """Each rank's queries with the keys of all ranks, as they are gathered: values, and the gradient of every key."""
    cu_seqlens = torch.tensor([0, *chunks]).cumsum(0) * 2 * size
    positions = torch.cat([torch.arange(n) for n in cu_seqlens.diff().tolist()])
    cpu, num = torch.device("cpu"), len(positions)
    q = torch.randn(num, 2, 4, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(num, groups, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.randn(num, 8, dtype=torch.float64)
    want = attend(q, k, v, pack_row(cu_seqlens, positions, cpu))
    gradients = torch.autograd.grad((want * weight).sum(), (q, k, v))
    shares = [own_positions(cu_seqlens, rank, size) for rank in range(size)]
    gathered = torch.cat(shares)
    total = 0.0
    for rank, share in enumerate(shares):
        row = pack_row(cu_seqlens, positions, cpu, cp_rank=rank, cp_size=size).with_biases(torch.float64)
        assert torch.equal(row.position_ids, positions[share])
        got = attend(q[share], k[gathered], v[gathered], row)
        torch.testing.assert_close(got, want[share])
        total = total + (got * weight[share]).sum()
    for got, right in zip(torch.autograd.grad(total, (q, k, v)), gradients, strict=True):
        torch.testing.assert_close(got, right)
