import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d3s_megatron.algorithms.schedules import Triggered, amounts_at, make_schedule


def linear(step, num_steps, kept=(8, 32), share=(0.1, 0.4)):
    return amounts_at(make_schedule("linear"), step, num_steps, kept, share)


def climb(schedule, name, values, state=None):
    """w before every step that logs one of the values, and after the last; and the states."""
    states = [state or {}]
    for value in values:
        states.append(schedule.after(states[-1], {name: value}))
    return [schedule.weight(0.5, state) for state in states], states


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
    amounts = [amounts_at(make_schedule("constant"), s, 5, (8, 32), (0.1, 0.4)) for s in range(5)]
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


def test_cosine_and_stairs_begin_and_end_where_the_line_does():
    cosine, stairs = make_schedule("cosine"), make_schedule("step", stages=4)
    assert [cosine.weight(p, {}) for p in (0, 0.5, 1)] == pytest.approx([0, 0.5, 1])
    assert cosine.weight(0.1, {}) < 0.1 and cosine.weight(0.9, {}) > 0.9
    assert [stairs.weight(p, {}) for p in (0, 0.24, 0.25, 0.5, 0.74, 0.75, 1)] == [0, 0, 1 / 3, 2 / 3, 2 / 3, 1, 1]
    assert amounts_at(stairs, 99, 100, (8, 32), (0.1, 0.4)).num_kept == 32


def test_a_reward_that_rises_no_more_climbs_a_stair():
    schedule = make_schedule("reward", stages=3, window=2)
    rising, _ = climb(schedule, "reward", [0.1 * i for i in range(9)])
    assert set(rising) == {0}
    flat, _ = climb(schedule, "reward", [0.5] * 7)  # the first is the best; two without a better one, and so on
    assert flat == [0, 0, 0, 0.5, 0.5, 1, 1, 1]


def test_a_lost_part_of_the_entropy_climbs_a_stair_and_none_is_given_back():
    schedule = make_schedule("entropy", stages=4, window=1)  # a window of one is the value itself
    weights, _ = climb(schedule, "entropy", [2.0, 1.6, 1.5, 0.9, 1.9, 0.0, 0.0])
    assert weights == pytest.approx([0, 0, 0, 1 / 3, 2 / 3, 2 / 3, 1, 1])


def test_a_step_without_a_number_leaves_the_state():
    for name in ("reward", "entropy"):
        schedule = make_schedule(name, window=2)
        state = schedule.after({}, {name: 0.5})
        assert schedule.after(state, {name: math.nan}) == state and schedule.after(state, {name: None}) == state


@given(st.sampled_from(["reward", "entropy"]), st.lists(st.floats(0, 2), min_size=1, max_size=40), st.data())
def test_a_schedule_goes_on_exactly_from_its_written_state_and_never_falls(name, values, data):
    import json

    schedule = Triggered(name, stages=5, window=3)
    weights, states = climb(schedule, name, values)
    assert weights == sorted(weights) and 0 <= weights[0] and weights[-1] <= 1
    cut = data.draw(st.integers(0, len(values)))
    again, _ = climb(schedule, name, values[cut:], json.loads(json.dumps(dict(states[cut]))))
    assert again == weights[cut:]


@given(st.sampled_from(["constant", "linear", "cosine", "step"]), st.floats(0, 1))
def test_those_by_progress_have_no_state(name, progress):
    schedule = make_schedule(name)
    assert schedule.after({}, {"reward": 0.5, "entropy": 1.0}) == {}
    assert 0 <= schedule.weight(progress, {}) <= 1
