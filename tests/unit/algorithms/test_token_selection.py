import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from d3s_megatron import ops
from d3s_megatron.algorithms.token_selection import AllTokens, TopShare

from .builders import alone, in_ranks, sample, scores


def batch(rows):
    """[(advantage, entropies)] -> samples and scores; uids are 10, 11, ..."""
    samples = [sample(10 + i, len(entropy), advantage) for i, (advantage, entropy) in enumerate(rows)]
    return samples, [scores(entropy) for _, entropy in rows]


def select(rows, share, seed=0, step=0):
    return [mask.tolist() for mask in TopShare()(*batch(rows), share, seed, step, alone)]


def oracle(rows, share, seed=0, step=0):
    """One sort of all tokens by (score descending, hash of uid, position)."""
    tokens = [
        (-abs(torch.tensor(a, dtype=torch.float64).float().item() * h), ops.mix64(seed, step, 10 + i), t, i)
        for i, (a, entropy) in enumerate(rows)
        for t, h in enumerate(entropy)
    ]
    k = min(len(tokens), max(1, math.ceil(share * len(tokens) - 1e-9)))
    masks = [[False] * len(entropy) for _, entropy in rows]
    for _, _, t, i in sorted(tokens)[:k]:
        masks[i][t] = True
    return masks


def test_one_ranking_over_all_samples():
    rows = [(0.5, [2.0, 1.0, 0.1]), (-2.0, [0.4, 0.1]), (1.0, [0.0])]
    # scores 1.0 0.5 0.05 | 0.8 0.2 | 0
    assert select(rows, 0.5) == [[True, True, False], [True, False], [False]]
    assert select(rows, 1 / 6) == [[True, False, False], [False, False], [False]]


def test_zero_scores_fill_up_the_share():
    masks = select([(0.0, [3.0] * 6), (1.0, [1.0, 1.0])], 0.5)
    assert masks[1] == [True, True] and sum(masks[0]) == 2
    assert masks[0] == [True, True, False, False, False, False]  # equal scores of one sample by position


@pytest.mark.parametrize(("share", "num"), [(1e-9, 1), (0.1, 1), (0.11, 2), (0.3, 3), (0.31, 4), (1.0, 10)])
def test_the_count_is_exact(share, num):
    assert sum(sum(mask) for mask in select([(1.0, [1.0] * 7), (1.0, [1.0] * 3)], share)) == num


def test_ties_go_by_hash_of_uid_and_depend_on_seed_and_step():
    rows = [(1.0, [1.0])] * 6
    draws = {str(select(rows, 0.5, seed, step)) for seed in range(3) for step in range(4)}
    assert len(draws) > 4
    assert all(select(rows, 0.5, 1, step) == oracle(rows, 0.5, 1, step) for step in range(4))


rows = st.lists(
    st.tuples(
        st.sampled_from([-2.0, -0.5, 0.0, 0.5, 1.0]),
        st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0]), min_size=1, max_size=5),
    ),
    min_size=1,
    max_size=6,
)


@given(rows, st.floats(0.01, 1.0), st.integers(0, 3))
def test_equals_a_sort_of_all_tokens(rows, share, step):
    assert select(rows, share, 7, step) == oracle(rows, share, 7, step)


@given(rows, st.floats(0.01, 1.0), st.lists(st.integers(0, 2), min_size=6, max_size=6))
@settings(max_examples=25)
def test_ranks_do_not_matter(rows, share, owner):
    samples, all_scores = batch(rows)
    alone_masks = TopShare()(samples, all_scores, share, 0, 0, alone)
    parts = [[i for i in range(len(rows)) if owner[i] == rank] for rank in range(3)]  # some ranks may be empty

    def work(part, reduce):
        return TopShare()([samples[i] for i in part], [all_scores[i] for i in part], share, 0, 0, reduce)

    for part, masks in zip(parts, in_ranks(parts, work), strict=True):
        assert [m.tolist() for m in masks] == [alone_masks[i].tolist() for i in part]


def test_a_share_of_one_is_every_token():
    samples, all_scores = batch([(0.0, [0.0, 0.5]), (1.0, [1.0])])
    top = TopShare()(samples, all_scores, 1.0, 0, 0, alone)
    everything = AllTokens()(samples, all_scores, 0.1, 0, 0, alone)
    assert [m.tolist() for m in top] == [m.tolist() for m in everything] == [[True, True], [True]]
    assert all(m.dtype == torch.bool for m in [*top, *everything])


def test_an_empty_batch():
    assert list(TopShare()([], [], 0.5, 0, 0, alone)) == []
    assert list(AllTokens()([], [], 0.5, 0, 0, alone)) == []


def test_an_entropy_that_is_not_a_number_is_refused():
    with pytest.raises(ValueError, match="1 NaN"):
        select([(1.0, [1.0, math.nan])], 0.5)


def test_by_entropy_alone_no_advantage_counts():
    rows = [(0.0, [2.0, 1.0, 0.1]), (-2.0, [0.4, 1.5])]
    by_entropy = TopShare("entropy")
    masks = by_entropy(*batch(rows), 0.4, 0, 0, alone)
    assert [mask.tolist() for mask in masks] == [[True, False, False], [False, True]]


@given(rows, st.floats(0.01, 1.0), st.lists(st.integers(0, 2), min_size=6, max_size=6), st.integers(0, 3))
@settings(max_examples=25)
def test_chance_keeps_as_many_whatever_the_scores_and_the_ranks(rows, share, owner, step):
    samples, all_scores = batch(rows)
    by_chance = TopShare("chance")
    whole = by_chance(samples, all_scores, share, 5, step, alone)
    assert sum(int(mask.sum()) for mask in whole) == sum(map(sum, select(rows, share)))
    other_scores = [scores([9.0 - h for h in s.entropy.tolist()]) for s in all_scores]
    assert [m.tolist() for m in by_chance(samples, other_scores, share, 5, step, alone)] == [m.tolist() for m in whole]
    parts = [[i for i in range(len(rows)) if owner[i] == rank] for rank in range(3)]

    def work(part, reduce):
        return by_chance([samples[i] for i in part], [all_scores[i] for i in part], share, 5, step, reduce)

    for part, masks in zip(parts, in_ranks(parts, work), strict=True):
        assert [m.tolist() for m in masks] == [whole[i].tolist() for i in part]


def test_chance_favours_no_position_and_is_drawn_anew_every_step():
    samples, all_scores = batch([(1.0, [1.0] * 8)] * 250)
    counts, draws = torch.zeros(8), set()
    for step in range(4):
        masks = torch.stack(list(TopShare("chance")(samples, all_scores, 0.25, 0, step, alone)))
        counts += masks.sum(0)
        draws.add(str(masks[:8].tolist()))
    assert len(draws) == 4 and counts.sum() == 2000
    assert counts.min() > 200 and counts.max() < 300  # 250 each on average, standard deviation 14
