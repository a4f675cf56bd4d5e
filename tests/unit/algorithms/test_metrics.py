import math

import pytest

from d3s_megatron.algorithms.config import AlgorithmConfig
from d3s_megatron.algorithms.metrics import selection_metrics
from d3s_megatron.algorithms.recipes import make_recipe

from .builders import NAN, experience, success


def metrics(name, groups, num_kept):
    """What a training step logs."""
    recipe = make_recipe(AlgorithmConfig(name=name, samples_per_prompt=8, kept_per_prompt_final=8))
    before = experience(groups)
    return selection_metrics(before, recipe.apply(before, num_kept), recipe.advantages_of_all(before))


def test_every_number_by_hand():
    """Right, wrong, no verdict, right | all wrong | one of two right: advantages 0.577 -1.155 0.577 | 0 | +-0.707."""
    got = metrics("d1s-c", [[1, 0, NAN, 1], [0, 0], [1, 0]], 1)  # 1 x 3 groups: -1.155 and +0.707, then 0.577 or so
    kept = [0.707107, 0.577350, -1.154701]
    mean = sum(kept) / 3
    square = sum(a * a for a in kept)
    assert got == pytest.approx(
        {
            "reward": 3 / 7,
            "reward_std": math.sqrt((3 * (4 / 7) ** 2 + 4 * (3 / 7) ** 2) / 6),
            "num_rollouts": 8,
            "num_without_verdict": 1,
            "num_kept": 3,
            "kept_share": 3 / 8,
            "sur_all": 2 / 3,
            "sur": 1.0,
            "nonzero_advantage_share": 1.0,
            "advantage_variance_all": 3 / 6,  # mean 0, squares 2 + 0 + 1 over seven rollouts
            "advantage_variance_kept": sum((a - mean) ** 2 for a in kept) / 2,
            "effective_samples": sum(map(abs, kept)) ** 2 / square,
            "sign_balance": 1 / 3,
            "truncated_share": 0.0,
            "response_length": 4.5,
            "response_length_kept": got["response_length_kept"],
        },
        abs=1e-5,
    )
    # Lengths are 1 to 8: the wrong one has 2, group 2's right one 7, and one of the two equal right ones 1 or 4.
    assert got["response_length_kept"] * 3 in (pytest.approx(2 + 7 + 1), pytest.approx(2 + 7 + 4))


def test_plain_grpo_keeps_everything():
    got = metrics("grpo", [success(4), success(8), success(0), success(1)], 2)
    assert got["num_kept"] == 32 and got["kept_share"] == 1
    assert got["sur"] == got["sur_all"] == got["nonzero_advantage_share"] == 0.5
    assert got["advantage_variance_kept"] == got["advantage_variance_all"] == pytest.approx(14 / 31)
    assert got["sign_balance"] == pytest.approx((5 - 11) / 16)
    assert got["response_length"] == got["response_length_kept"]


def test_cross_group_selection_raises_usefulness_and_variance():
    groups = [success(1), success(4), success(8), [1.0] * 7 + [0.0]]
    got = metrics("d3s", groups, 2)
    assert (got["sur_all"], got["sur"]) == (0.75, 1.0)
    assert got["advantage_variance_all"] == pytest.approx(0.677419, abs=1e-6)
    assert got["advantage_variance_kept"] == pytest.approx(2.5, abs=1e-6)
    assert got["sign_balance"] == 0
    even = 6 * 0.935414 + 2 * 2.474874
    assert got["effective_samples"] == pytest.approx(even**2 / 17.5, abs=1e-4)


def test_usefulness_is_that_of_the_whole_group():
    """A group of which only right answers are kept still has answers that differ."""
    got = metrics("d1s-c", [success(1), success(1), success(1)], 1)
    assert got["sur"] == 1.0


def test_pods_is_compared_with_the_advantages_of_the_whole_batch():
    pods, d1s = metrics("pods", [success(1), success(6)], 4), metrics("d1s", [success(1), success(6)], 4)
    assert pods["advantage_variance_all"] == pytest.approx(d1s["advantage_variance_all"]) == pytest.approx(14 / 15)
    assert pods["advantage_variance_kept"] == pytest.approx(6 / 7)  # two groups of four with variance 1 and mean 0
    assert d1s["advantage_variance_kept"] > 1


@pytest.mark.parametrize("groups", [[success(8)], [[NAN] * 4], [[NAN, 1.0]]])
def test_without_a_signal_nothing_is_infinite(groups):
    got = metrics("d3s", groups, 2)
    assert got["sur"] == got["effective_samples"] == got["sign_balance"] == got["advantage_variance_kept"] == 0
    assert math.isnan(got.pop("reward")) == all(math.isnan(r) for r in groups[0])
    assert all(math.isfinite(value) for value in got.values())
