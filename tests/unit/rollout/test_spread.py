"""Prompts go to engines by the answers they expect, and the answers are the same whoever gives them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from d3s_megatron import stages
from d3s_megatron.actor.parallel import Layout
from d3s_megatron.rollout import Sampling
from d3s_megatron.rollout.spread import PromptLengths, spread
from d3s_megatron.types import Prompt

EXPECTED = st.lists(st.integers(0, 50), max_size=12)


def loads(shares, expected):
    return [sum(expected[i] for i in share) for share in shares]


@given(EXPECTED, st.integers(1, 4), st.integers(1, 3))
def test_every_prompt_goes_to_one_rank_and_no_engine_has_too_much(expected, num_engines, ranks_per_engine):
    shares = spread(expected, num_engines, ranks_per_engine)
    assert len(shares) == num_engines * ranks_per_engine
    assert sorted(i for share in shares for i in share) == list(range(len(expected)))
    engines = [sum(shares[e * ranks_per_engine : (e + 1) * ranks_per_engine], []) for e in range(num_engines)]
    if len(set(expected)) > 1:
        ideal = sum(expected) / num_engines
        assert max(loads(engines, expected)) <= ideal + max(expected) * (1 - 1 / num_engines) + 1e-9
        for share in shares:
            assert [expected[i] for i in share] == sorted((expected[i] for i in share), reverse=True)


def test_shares_follow_lengths_and_where_nothing_is_known_the_count():
    assert spread([0, 0, 0, 0, 0], 2) == [[0, 1], [2, 3, 4]]
    assert spread([10, 10, 90, 10, 60], 2) == [[2], [4, 0, 1, 3]]
    assert spread([10, 10, 90, 10, 60], 2, ranks_per_engine=2) == [[2], [], [4, 1], [0, 3]]


def test_lengths_are_those_of_a_prompts_last_answers_and_survive_a_checkpoint():
    lengths = PromptLengths(5)
    assert lengths.expected([0, 4]) == [0, 0] and lengths.as_text() == ""
    lengths.add([3, 1], [0, 0, 1, 1], [10, 20, 3, 4])
    lengths.add([3], [0], [5])
    assert lengths.expected([3, 1, 0]) == [5, 3.5, 4.25]
    again = PromptLengths(5, lengths.as_text())
    assert again.expected(range(5)) == lengths.expected(range(5))
    assert PromptLengths(6, lengths.as_text()).expected([3]) == [0]
    assert len(PromptLengths(5, lengths.as_text()).as_text()) < 60
    lengths.add([0, 2], [1], [7])  # no answer of the first one
    assert lengths.expected([0, 2]) == [np.mean([3.5, 7, 5]), 7]


@pytest.mark.parametrize("expected", [[0, 0, 0, 0], [3, 40, 1, 2]])
def test_answers_are_the_same_whatever_the_spread(engine, expected):
    """One seed per (run, step, prompt, sample)."""
    prompts = [Prompt(f"p{i}", "", ids, "") for i, ids in enumerate([(1, 10, 2), (5,), (3, 4, 10, 5), (7, 11)])]
    one, sampling = engine(), Sampling(0.8, max_new_tokens=6)

    def generate(rank, num_ranks, share):
        layout = Layout(rank, num_ranks, 0, 1, 0, 1, rank, num_ranks, device=torch.device("cpu"))
        return stages.generate(one, prompts, 3, sampling, 5, 2, layout, share)

    whole = generate(0, 1, None)
    assert [r.request.uid for r in whole] == list(range(12))
    shares = spread(expected, 3)
    parts = [rollout for rank in range(3) for rollout in generate(rank, 3, shares[rank])]
    assert {r.request: r.token_ids for r in parts} == {r.request: r.token_ids for r in whole}
