"""The prompt order: whole epochs, each in its own order, and nothing to save."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from d3s_megatron.data import PromptOrder


def test_resume_goes_on_where_the_run_stopped():
    """Fault E01: 12 prompts, 4 a step; a new object is all that a resumed run has."""
    whole = [PromptOrder(12, 4, seed=3).batch(step) for step in range(6)]
    resumed = PromptOrder(12, 4, seed=3)
    assert [resumed.batch(step) for step in (2, 3, 4, 5)] == whole[2:]
    first, second = sum(whole[:3], []), sum(whole[3:], [])
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second


@settings(deadline=None)
@given(st.integers(1, 30), st.integers(1, 40), st.integers(-(2**63), 2**64), st.integers(0, 3))
def test_every_prompt_once_an_epoch(num_prompts, batch_size, seed, epoch):
    order = PromptOrder(num_prompts, batch_size, seed)
    num_steps = -(-(epoch + 1) * num_prompts // batch_size)
    visits = sum((order.batch(step) for step in range(num_steps)), [])
    assert all(len(order.batch(step)) == batch_size for step in range(num_steps))
    assert sorted(visits[epoch * num_prompts : (epoch + 1) * num_prompts]) == list(range(num_prompts))


def test_the_seed_makes_the_order():
    assert PromptOrder(100, 10, seed=0).batch(0) != PromptOrder(100, 10, seed=1).batch(0)
    assert PromptOrder(100, 10, seed=0).batch(0)[:3] == [27, 46, 11]  # and keeps it from version to version
    assert PromptOrder(100, 10, seed=0).epoch(25) == 2.5


@pytest.mark.parametrize("arguments", [(0, 4, 0), (4, 0, 0)])
def test_an_order_of_nothing_is_refused(arguments):
    with pytest.raises(ValueError, match="at least one prompt"):
        PromptOrder(*arguments)


def test_steps_before_the_first_are_refused():
    with pytest.raises(ValueError, match="step is -1"):
        PromptOrder(4, 2, 0).batch(-1)
