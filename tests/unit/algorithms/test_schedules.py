import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d3s_megatron.algorithms.schedules import amounts_at


def linear(step, num_steps, kept=(8, 32), share=(0.1, 0.4)):
    return amounts_at("linear", step, num_steps, kept, share)


def test_ends_are_exact():
    first, last = linear(0, 100), linear(99, 100)
    assert (first.progress, first.num_kept, first.token_share) == (0.0, 8, 0.1)
    assert (last.progress, last.num_kept, last.token_share) == (1.0, 32, 0.4)
    assert linear(250, 100) == last  # a run that is carried on stays at its end


def test_one_step_is_the_first():
    assert linear(0, 1) == linear(0, 100)


def test_halves_round_up():
    assert [linear(s, 5, kept=(2, 4)).num_kept for s in range(5)] == [2, 3, 3, 4, 4]  # 2, 2.5, 3, 3.5, 4


def test_constant_stays():
    amounts = [amounts_at("constant", s, 5, (8, 32), (0.1, 0.4)) for s in range(5)]
    assert {(a.num_kept, a.token_share) for a in amounts} == {(8, 0.1)}
    assert [a.progress for a in amounts] == [0, 0.25, 0.5, 0.75, 1]


ints = st.integers(2, 64)


@given(ints, ints, st.integers(2, 300), st.data())
def test_follows_the_line_within_half(first, last, num_steps, data):
    step = data.draw(st.integers(0, num_steps - 1))
    amounts = linear(step, num_steps, (first, last), (first / 64, last / 64))
    exact = first + (last - first) * step / (num_steps - 1)
    assert -0.5 - 1e-9 <= exact - amounts.num_kept <= 0.5 + 1e-9
    assert amounts.token_share == pytest.approx(exact / 64)
    assert min(first, last) <= amounts.num_kept <= max(first, last)
    assert 0 < amounts.token_share <= 1 and math.isfinite(amounts.token_share)
