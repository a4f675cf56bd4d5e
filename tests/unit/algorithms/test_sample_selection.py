"""The credit chain, rewards -> advantages -> kept rollouts, against golden vectors and every subset."""

import statistics
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from d3s_megatron import ops
from d3s_megatron.algorithms.advantages import GroupAdvantages
from d3s_megatron.algorithms.sample_selection import DropZero, MaxVariance, RandomSamples, tie_keys

from .builders import NAN, experience, kept_uids, success

GOLDEN_BATCH = (success(1), success(4), success(8), [1.0] * 7 + [0.0])


def credit(groups, num_kept, scope="batch", of="advantage", seed=0, step=0, extra=()):
    batch = GroupAdvantages()(experience(groups, seed, step), num_kept)
    for part in (MaxVariance(of, scope), *extra):
        batch = part(batch, num_kept)
    return batch


def variance(batch):
    return float(batch.advantages[batch.kept].var())


@pytest.mark.parametrize(
    ("num_kept", "right", "wrong", "want"),
    [(2, 1, 1, 1.866667), (3, 2, 1, 1.244444), (4, 2, 2, 1.244444), (5, 3, 2, 1.12), (8, 3, 5, 1.0)],
)
def test_golden_within_a_group(num_kept, right, wrong, want):
    for scope in ("group", "batch"):  # one group is a batch
        batch = credit([success(3)], num_kept, scope)
        assert variance(batch) == pytest.approx(want, abs=1e-6)
        assert batch.rewards[batch.kept].sum() == right
        assert batch.kept.sum() == right + wrong


@pytest.mark.parametrize(
    ("per_prompt", "want", "must_hold"),
    [
        (0, 12.25, {0, 31}),  # clamped to two of the pool
        (1, 4.666667, {0, 31}),
        (2, 2.5, {0, 31}),
        (6, 0.913043, {*range(16), *range(24, 32)}),
        (8, 0.677419, set(range(32))),
    ],
)
def test_golden_across_groups(per_prompt, want, must_hold):
    batch = credit(GOLDEN_BATCH, per_prompt)
    kept = set(kept_uids(batch))
    assert len(kept) == max(2, 4 * per_prompt)
    assert variance(batch) == pytest.approx(want, abs=1e-6)
    assert must_hold <= kept
    if per_prompt < 6:  # the rest from the even group, right and wrong alike; which ones is drawn
        each = (len(kept) - 2) // 2
        assert len(kept & set(range(8, 12))) == len(kept & set(range(12, 16))) == each


def brute_force(pool, values, keys, m):
    """The rule of method 1.6 over a pool of uids: the split, and the best variance of any subset of that size."""
    m = min(m, len(pool))
    order = sorted(pool, key=lambda u: (-values[u], keys[u]))
    spread = []
    for k in range(m + 1):
        x = [values[u] for u in order[:k] + order[len(order) - (m - k) :]]
        spread.append(sum(v * v for v in x) - sum(x) ** 2 / m)
    tied = [k for k in range(m + 1) if spread[k] >= max(spread) * (1 - 1e-9)]
    k = min(tied, key=lambda k: (abs(2 * k - m), -k))
    best = max(statistics.variance([values[u] for u in some]) for some in combinations(pool, m)) if m > 1 else 0
    return set(order[:k] + order[len(order) - (m - k) :]), best


small_groups = st.lists(
    st.lists(st.sampled_from([0.0, 1.0, 0.5, 0.25, NAN]), min_size=1, max_size=4), min_size=1, max_size=3
)


@given(small_groups, st.integers(2, 4), st.sampled_from(["group", "batch"]), st.integers(0, 5))
@settings(max_examples=60)
def test_equals_brute_force(groups, num_kept, scope, step):
    batch = credit(groups, num_kept, scope, seed=3, step=step)
    values = textbook_advantages(groups)
    keys = [ops.mix64(3, step, uid) for uid in range(len(values))]
    pools, start = [], 0
    for group in groups:
        pools.append([start + i for i, r in enumerate(group) if r == r])
        start += len(group)
    budget = num_kept
    if scope == "batch":
        pools, budget = [sum(pools, [])], num_kept * len(groups)
    want = set()
    for pool in filter(None, pools):
        chosen, best = brute_force(pool, values, keys, budget)
        want |= chosen
        if len(chosen) > 1:
            assert statistics.variance([values[u] for u in chosen]) == pytest.approx(best, abs=1e-9)
    assert set(kept_uids(batch)) == want


def textbook_advantages(groups):
    """Plain Python; rounded, so that equal advantages of different groups are equal."""
    out = []
    for group in groups:
        there = [r for r in group if r == r]
        std = statistics.stdev(there) if len(set(there)) > 1 else 0
        out += [round((r - statistics.fmean(there)) / std, 12) if r == r and std else 0.0 for r in group]
    return out


coarse = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=3, max_size=8)


@given(coarse, st.integers(2, 8))
def test_within_a_group_rewards_and_advantages_choose_the_same(rewards, num_kept):
    assert kept_uids(credit([rewards], num_kept, "group", "advantage")) == kept_uids(
        credit([rewards], num_kept, "group", "reward")
    )


def test_across_groups_rewards_and_advantages_choose_differently():
    groups = (success(1), success(7))
    assert kept_uids(credit(groups, 2)) != kept_uids(credit(groups, 2, of="reward"))


@given(coarse)
def test_variance_only_falls_as_more_is_kept(rewards):
    seen = [variance(credit([rewards], m)) for m in range(2, len(rewards) + 1)]
    assert all(more <= less + 1e-9 for less, more in zip(seen, seen[1:], strict=False))
    if max(rewards) > min(rewards):
        assert all(v >= 1 - 1e-9 for v in seen)  # Lemma 1, with the sample variance


@given(st.lists(coarse, min_size=1, max_size=4), st.integers(2, 6), st.randoms())
@settings(max_examples=50)
def test_the_order_of_rows_does_not_matter(groups, num_kept, random):
    batch = GroupAdvantages()(experience(groups), 0)
    order = list(range(len(batch.uids)))
    random.shuffle(order)
    rows = ("uids", "group_ids", "rewards", "lengths", "advantages", "kept")
    shuffled = replace(batch, **{name: getattr(batch, name)[order] for name in rows})
    for scope in ("group", "batch"):
        select = MaxVariance("advantage", scope)
        assert set(kept_uids(select(batch, num_kept))) == set(kept_uids(select(shuffled, num_kept)))


def test_nothing_is_normalised_again():
    before = GroupAdvantages()(experience(GOLDEN_BATCH), 0)
    after = MaxVariance("advantage", "batch")(before, 2)
    assert torch.equal(after.advantages, before.advantages)
    assert torch.equal(after.rewards, before.rewards)


def test_the_one_different_answer_stays():
    batch = credit([[1.0] + [0.4] * 5], 2, "group")
    assert 0 in kept_uids(batch)
    assert sorted(batch.advantages[batch.kept].tolist()) == pytest.approx([-0.408248, 2.041241], abs=1e-6)


@pytest.mark.parametrize("scope", ["group", "batch"])
def test_at_least_two_of_a_pool(scope):
    assert len(kept_uids(credit([success(1)], 1, scope))) == 2
    assert len(kept_uids(credit([success(1)], 0, scope))) == 2


@pytest.mark.parametrize("scope", ["group", "batch"])
def test_a_pool_that_is_too_small_is_kept_whole(scope):
    assert kept_uids(credit([[1, 0, NAN, 1], [NAN, 0, NAN, NAN]], 4, scope)) == [0, 1, 3, 5]
    assert kept_uids(credit([[NAN, NAN], [NAN]], 2, scope)) == []


def test_the_budget_counts_every_prompt_of_the_batch():
    """N x prompts, also where a prompt has no verdict at all."""
    assert len(kept_uids(credit([[NAN] * 4, success(2, 6), success(3, 6)], 2))) == 6
    assert len(kept_uids(credit([[NAN] * 4, success(2, 6), success(3, 6)], 2, "group"))) == 4


def test_exactly_n_filled_with_zero_advantages():
    groups = (success(1, 4), success(4, 4), success(0, 4))  # four rollouts with a signal, eight without
    batch = credit(groups, 2)
    assert len(kept_uids(batch)) == 6 and {0, 1, 2, 3} <= set(kept_uids(batch))
    dropped = credit(groups, 2, extra=[DropZero()])
    assert kept_uids(dropped) == [0, 1, 2, 3]


def test_all_equal_keeps_n_the_same_every_time():
    groups = [success(8), success(0), success(8)]
    for scope in ("group", "batch"):
        batch = credit(groups, 3, scope)
        assert len(kept_uids(batch)) == 9
        assert kept_uids(batch) == kept_uids(credit(groups, 3, scope))
        assert batch.advantages.tolist() == [0.0] * 24
    assert kept_uids(credit(groups, 3, extra=[DropZero()])) == []


def test_ties_are_drawn_by_seed_step_and_uid():
    groups = [success(4)]
    draws = {tuple(kept_uids(credit(groups, 2, seed=seed, step=step))) for seed in range(4) for step in range(8)}
    assert len(draws) > 8  # of 16 possible pairs
    batch = experience(groups, seed=5, step=9)
    assert tie_keys(batch).tolist() == [ops.mix64(5, 9, uid) for uid in range(8)]
    kept = kept_uids(credit(groups, 2, seed=5, step=9))
    first = min(range(4), key=lambda u: ops.mix64(5, 9, u))
    last = max(range(4, 8), key=lambda u: ops.mix64(5, 9, u))
    assert kept == [first, last]


def test_ties_favour_no_prompt():
    """Sixty-four groups with the same rewards, their right answers at changing places: the cut falls by hash alone."""
    groups = [success(5, 12)[i % 12 :] + success(5, 12)[: i % 12] for i in range(64)]
    batch = credit(groups, 2)
    taken = torch.bincount(batch.group_ids[batch.kept], minlength=64)
    assert len(batch.advantages.unique()) == 2
    assert taken.sum() == 128 and taken.max() < 12
    early, late = taken[:32].sum(), taken[32:].sum()
    assert abs(int(early - late)) < 40


def test_chance_keeps_n_times_prompts_whatever_their_rewards():
    draws = {}
    for step in range(6):
        some = [RandomSamples()(experience(g, 3, step), 3) for g in ([success(1)] * 4, [success(7)] * 4)]
        assert kept_uids(some[0]) == kept_uids(some[1])
        draws[step] = tuple(kept_uids(some[0]))
    assert all(len(uids) == 12 for uids in draws.values()) and len(set(draws.values())) == 6
    assert kept_uids(RandomSamples()(experience([success(1)] * 4, 4, 0), 3)) != list(draws[0])


def test_chance_takes_from_rollouts_with_a_verdict_only():
    batch = RandomSamples()(experience([[NAN] * 6 + [1.0, 0.0], [NAN] * 8]), 4)
    assert kept_uids(batch) == [6, 7]
    assert kept_uids(RandomSamples()(experience([[NAN] * 4]), 2)) == []


def test_chance_favours_no_prompt_and_no_place():
    taken = torch.zeros(16, 8)
    for step in range(100):
        batch = RandomSamples()(experience([success(2)] * 16, 0, step), 2)
        taken += batch.kept.view(16, 8)
    assert taken.sum() == 3200
    for axis, expected in ((0, 400), (1, 200)):
        assert (taken.sum(axis) - expected).abs().max() < expected / 4
