"""Packing: the invariants on random batches, and what is left out of a row."""

import torch
from builders import random_samples
from helpers import check_packing, context
from hypothesis import given, settings
from hypothesis import strategies as st

from d3s_megatron.actor.packing import distribute, empty_row, fill_up, pack, same_length, split_rows
from d3s_megatron.types import Sample


@settings(max_examples=60, deadline=None)
@given(
    num=st.integers(0, 40),
    seed=st.integers(0, 9),
    per_prompt=st.integers(1, 8),
    max_tokens=st.integers(1, 60),
    multiple=st.sampled_from([1, 2, 4]),
    share=st.booleans(),
)
def test_every_response_token_is_scored_once_from_the_position_before_it(
    num, seed, per_prompt, max_tokens, multiple, share
):
    samples = random_samples(num, seed, per_prompt=per_prompt)
    check_packing(samples, pack(samples, max_tokens, multiple, share_prompts=share), max_tokens, multiple)


def test_samples_of_one_prompt_share_its_tokens():
    first, second, third = (
        Sample(i, (5, 6), tokens, (0.0,) * len(tokens), 1.0) for i, tokens in enumerate([(1, 2), (3,), (4, 7, 8)])
    )
    other = Sample(3, (9,), (1, 1), (0.0,) * 2, 1.0)
    (row,) = pack([first, other, second, third], 100)
    assert row.token_ids.tolist() == [5, 6, 1, 4, 7, 9, 1]  # `second` ends with its prompt
    assert row.position_ids.tolist() == [0, 1, 2, 2, 3, 0, 1]
    assert row.cu_seqlens.tolist() == [0, 2, 3, 5, 7] and row.prefix.tolist() == [-1, 0, 0, -1]
    assert row.samples == (0, 2, 3, 1)
    assert row.rows.tolist() == [1, 2, 1, 1, 3, 4, 5, 6]
    assert row.targets.tolist() == [1, 2, 3, 4, 7, 8, 1, 1]
    assert row.token_index.tolist() == [0, 1, 4, 5, 6, 7, 2, 3]
    (apart,) = pack([first, other, second, third], 100, share_prompts=False)
    assert len(apart.token_ids) == 3 + 2 + 2 + 4 and bool((apart.prefix == -1).all())


def test_labels_do_not_cross_the_border_between_two_samples():
    """Fault C08: packed [5,6,7,8] and [30,31,32] have five scored positions when the first token is the prompt."""
    samples = [
        Sample(0, (5,), (6, 7, 8), (0.0,) * 3, 1.0),
        Sample(1, (30,), (31, 32), (0.0,) * 2, 1.0),
    ]
    (row,) = pack(samples, 100)
    assert row.token_ids.tolist() == [5, 6, 7, 30, 31]
    assert row.rows.tolist() == [0, 1, 2, 3, 4]
    assert row.targets.tolist() == [6, 7, 8, 31, 32]


def test_a_sample_ends_after_its_last_scored_token_and_one_without_any_is_left_out():
    samples = random_samples(3, seed=3)
    lengths = [len(s.response_ids) for s in samples]
    scored = [torch.zeros(length, dtype=torch.bool) for length in lengths]
    scored[1][0] = scored[2][-1] = True
    (row,) = pack(samples, 1000, scored=scored)
    assert row.samples == (1, 2)
    assert row.cu_seqlens.tolist()[1] == len(samples[1].prompt_ids)
    assert row.targets.tolist() == [samples[1].response_ids[0], samples[2].response_ids[-1]]


def test_values_of_all_rows_come_back_to_their_samples():
    samples = random_samples(13, seed=1, per_prompt=4)
    rows = pack(samples, 20)
    values = torch.cat([row.targets for row in rows])
    back = split_rows(values, rows, [len(sample.response_ids) for sample in samples])
    assert [tuple(v.tolist()) for v in back] == [s.response_ids for s in samples]


def test_ranks_with_fewer_rows_are_filled_up_and_stages_get_one_shape():
    rows = fill_up(pack(random_samples(5), 12), 9, multiple_of=2)
    assert len(rows) == 9 and rows[-1].samples == () and len(rows[-1].rows) == 0
    assert len(empty_row(4).token_ids) == 4
    assert len({len(row.token_ids) for row in same_length(rows)}) == 1
    for before, after in zip(rows, same_length(rows), strict=True):
        assert torch.equal(before.targets, after.targets) and int(after.cu_seqlens[-1]) == len(after.token_ids)


def test_a_long_sample_weighs_more_than_short_ones_of_as_many_tokens():
    """Attention grows with the square: 32k tokens in one sample are balanced by more tokens in short ones."""
    rank = distribute(torch.tensor([32_768] + [1_024] * 44), 2)
    assert int((rank != rank[0]).sum()) == 44  # 45k tokens against 32k: 46k and 66k by cost
    assert distribute(torch.zeros(0, dtype=torch.int64), 2).tolist() == []


@settings(max_examples=40, deadline=None)
@given(num=st.integers(0, 20), seed=st.integers(0, 9), share=st.floats(0, 1), truncate=st.booleans())
def test_kept_tokens_are_scored_in_any_packing_and_rows_hold_no_more_than_they_need(num, seed, share, truncate):
    samples = random_samples(num, seed, per_prompt=3)
    generator = torch.Generator().manual_seed(seed)
    keep = [torch.rand(len(s.response_ids), generator=generator) < share for s in samples]
    rows = pack(samples, 20, scored=keep, truncate=truncate)
    seen = set()
    for row in same_length(rows) if rows else []:
        for position, target, order in zip(row.rows.tolist(), row.targets.tolist(), row.sequence.tolist(), strict=True):
            index = row.samples[order]
            tokens = [token for token, _ in context(row, position)]
            t = len(tokens) - len(samples[index].prompt_ids)
            assert tuple(tokens) == (samples[index].prompt_ids + samples[index].response_ids)[: len(tokens)]
            assert samples[index].response_ids[t] == target
            seen.add((index, t))
    assert seen == {(i, t) for i, mask in enumerate(keep) for t in mask.nonzero().flatten().tolist()}
    for row in rows:
        ends = {
            i: max(t for j, t in seen if j == i) if truncate else len(samples[i].response_ids) - 1 for i in row.samples
        }
        prompts = {samples[i].prompt_ids for i in row.samples}
        assert len(row.token_ids) == sum(map(len, prompts)) + sum(ends.values())


def test_padding_for_the_pipeline_is_cut_into_short_pieces():
    """Attention inside a long piece of padding would cost as much as a real sample of that length."""
    long = random_samples(1)[0]
    long = type(long)(0, (1,) * 1000, (2,), (0.0,), 1.0)
    padded = same_length([*pack([long], 2000), empty_row()])[1]
    assert int(padded.cu_seqlens.diff().max()) <= 256 and int(padded.cu_seqlens[-1]) == 1000
    assert int(padded.position_ids.max()) < 256
