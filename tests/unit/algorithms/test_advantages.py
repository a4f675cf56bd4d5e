import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from d3s_megatron.algorithms.advantages import GroupAdvantages
from d3s_megatron.ops import group_advantages

from .builders import NAN, experience, success


def advantages(*groups, normalize_std=True):
    batch = GroupAdvantages(normalize_std)(experience(groups), num_kept=0)
    return batch.advantages.tolist()


@pytest.mark.parametrize(
    ("num_right", "right", "wrong"), [(3, 1.207615, -0.724569), (1, 2.474874, -0.353553), (4, 0.935414, -0.935414)]
)
def test_golden(num_right, right, wrong):
    want = [right] * num_right + [wrong] * (8 - num_right)
    assert advantages(success(num_right)) == pytest.approx(want, abs=1e-6)


def test_groups_do_not_know_each_other():
    together = advantages(success(1), success(4), success(8), [1.0] * 7 + [0.0])
    apart = advantages(success(1)) + advantages(success(4)) + advantages(success(8)) + advantages([1.0] * 7 + [0.0])
    assert together == apart
    assert together[16:24] == [0.0] * 8
    assert together[31] == pytest.approx(-2.474874, abs=1e-6)


def test_group_ids_may_stand_in_any_order():
    ids = torch.tensor([7, -3, 7, -3, 7])
    got = group_advantages(torch.tensor([1.0, 5.0, 0.0, 3.0, 1.0]), ids, torch.ones(5, dtype=torch.bool))
    root = math.sqrt(0.5)
    assert got.tolist() == pytest.approx([0.577350, root, -1.154701, -root, 0.577350], abs=1e-6)


@pytest.mark.parametrize("value", [0.3, 0.1, 1.0, -7.7, 1e300])
@pytest.mark.parametrize("size", [1, 2, 3, 12])
@pytest.mark.parametrize("normalize_std", [True, False])
def test_equal_rewards_give_exactly_zero(value, size, normalize_std):
    assert advantages([value] * size, normalize_std=normalize_std) == [0.0] * size


def test_single_precision_rewards_that_are_equal_give_exactly_zero():
    rewards = torch.full((12,), 0.3, dtype=torch.float32)
    got = group_advantages(rewards, torch.zeros(12, dtype=torch.int64), torch.ones(12, dtype=torch.bool))
    assert got.tolist() == [0.0] * 12


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.float32])
def test_any_dtype_of_rewards(dtype):
    rewards = torch.tensor([1, 0, 0, 1], dtype=dtype)
    got = group_advantages(rewards, torch.zeros(4, dtype=torch.int64), torch.ones(4, dtype=torch.bool))
    assert got.dtype == torch.float64
    assert got.tolist() == pytest.approx([0.866025, -0.866025, -0.866025, 0.866025], abs=1e-6)


def test_a_rollout_without_verdict_leaves_its_group():
    batch = GroupAdvantages()(experience([[1, NAN, 0, 1], [NAN, NAN], [NAN, 1]]), 0)
    want = [0.577350, 0, -1.154701, 0.577350, 0, 0, 0, 0]
    assert batch.advantages.tolist() == pytest.approx(want, abs=1e-6)
    assert batch.kept.tolist() == [True, False, True, True, False, False, False, True]


def test_one_right_among_equal_partial_rewards():
    got = advantages([1.0] + [0.4] * 5)
    assert got == pytest.approx([2.041241] + [-0.408248] * 5, abs=1e-6)


def test_without_std_only_the_mean_is_taken():
    assert advantages([3.0, 1.0, 2.0, 0.0], normalize_std=False) == [1.5, -0.5, 0.5, -1.5]


def test_the_nearest_and_the_smallest_differences_count():
    close = [0.3, math.nextafter(0.3, 1)]
    tiny = [0.0, 5e-324, 0.0, 5e-324]
    assert advantages(close) == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)])
    assert advantages(tiny) == pytest.approx([-0.866025, 0.866025] * 2, abs=1e-6)


rewards = st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=12)


@given(rewards)
def test_equals_the_textbook(values):
    got = advantages(values)
    if max(values) == min(values):
        assert got == [0.0] * len(values)
        return
    assert statistics.fmean(got) == pytest.approx(0, abs=1e-9)
    assert statistics.variance(got) == pytest.approx(1, abs=1e-9)
    if max(values) - min(values) > 1e-3:
        mean, std = statistics.fmean(values), statistics.stdev(values)
        assert got == pytest.approx([(v - mean) / std for v in values], abs=1e-8)


@given(st.lists(st.sampled_from([0.0, 0.1, 0.3, 0.9, 1.0]), min_size=2, max_size=12), st.randoms())
def test_the_order_of_rows_does_not_change_a_bit(values, random):
    order = list(range(len(values)))
    random.shuffle(order)
    both = advantages(values, [values[i] for i in order])
    first, second = both[: len(values)], both[len(values) :]
    assert second == [first[i] for i in order]
