import pytest
import torch

from d3s_megatron.algorithms.rollout_correction import correction

OLD = torch.log(torch.tensor([0.5, 0.9, 0.2]))
ROLLOUT = torch.log(torch.tensor([0.4, 0.1, 0.4]))


@pytest.mark.parametrize(
    ("level", "expected"),
    [("none", [1, 1, 1]), ("token", [1.25, 2, 0.5]), ("sequence", [2, 2, 2])],  # 1.25 x 9 x 0.5 = 5.6, cut at 2
)
def test_ratios_are_cut_at_the_cap(level, expected):
    assert correction(OLD, ROLLOUT, level, 2.0).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_an_engine_that_agrees_changes_nothing(level):
    assert correction(OLD, OLD, level, 2.0).tolist() == [1, 1, 1]


def test_far_apart_stays_finite():
    assert torch.isfinite(correction(OLD, OLD - 500, "sequence", 1e9)).all()
    assert (correction(OLD - 500, OLD, "token", 2.0) > 0).all()
