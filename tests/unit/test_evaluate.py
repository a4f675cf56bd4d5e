import math
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d3s_megatron.evaluate import evaluate_policy, pass_at_first_k, pass_at_k, rank_share
from d3s_megatron.rewards import Reward
from d3s_megatron.rollout import Sampling
from d3s_megatron.types import Prompt, Rollout, Verdict


@pytest.mark.parametrize("num_samples", range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(num_samples):
    for num_correct in range(num_samples + 1):
        for k in range(1, num_samples + 1):
            subsets = list(combinations(range(num_samples), k))
            solved = sum(min(subset) < num_correct for subset in subsets)  # the first ones are right
            assert pass_at_k(num_samples, num_correct, k) == pytest.approx(solved / len(subsets), abs=1e-12)


@given(st.integers(1, 200), st.data())
def test_pass_at_k_bounds(num_samples, data):
    correct = data.draw(st.integers(0, num_samples))
    k = data.draw(st.integers(1, num_samples))
    value = pass_at_k(num_samples, correct, k)
    assert 0 <= value <= 1
    assert (value == 0) == (correct == 0)
    assert pass_at_k(num_samples, correct, 1) == pytest.approx(correct / num_samples)  # avg@n
    assert value >= pass_at_k(num_samples, correct, max(1, k - 1)) - 1e-12


@pytest.mark.parametrize("k", [0, 5])
def test_pass_at_k_refuses_more_draws_than_samples(k):
    with pytest.raises(ValueError, match=f"k is {k} with 4 samples"):
        pass_at_k(4, 2, k)


@given(st.integers(0, 50), st.integers(1, 9))
def test_ranks_cover_everything_once(num, world_size):
    shares = [rank_share(num, rank, world_size) for rank in range(world_size)]
    assert [slot for share in shares for slot in share] == list(range(num))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


class Table:
    """An engine that reads the answer of (group, sample) from a table of strings; an answer ending in ~ was cut."""

    def __init__(self, answers):
        self.answers = answers

    def generate(self, requests, sampling):
        out = []
        for request in requests:
            text = self.answers[request.group_id][request.uid % len(self.answers[0])]
            reason = "length" if text.endswith("~") else "stop"
            out.append(Rollout(request, (0,) * len(text), (-1.0,) * len(text), reason, text))
        return out


class Letter(Reward):
    """r is right, ? has no verdict."""

    def _grade(self, items):
        return [Verdict({"r": 1.0, "?": math.nan}.get(text[0], 0.0), "right") for text, _ in items]


ANSWERS = [["r", "w", "w", "r~"], ["w", "?", "w", "w"], ["r", "r", "r", "?xx"]]
PROMPTS = [Prompt(str(i), "", (1,), "r") for i in range(3)]


def evaluate(world_size, **options):
    """Every rank's share in turn, then the evaluation over the joined rows."""

    def share(rank, gather):
        return evaluate_policy(
            Table(ANSWERS), Letter(), PROMPTS, 4, Sampling(), 0, rank_share(3, rank, world_size), gather, **options
        )

    class Rows(Exception):
        pass

    def collect(rows):
        raise Rows(rows)

    everyone = []
    for rank in range(world_size):
        try:
            share(rank, collect)
        except Rows as rows:
            everyone.append(rows.args[0])
    return share(0, lambda rows: everyone)


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_evaluation_over_ranks(world_size):
    result = evaluate(world_size)
    assert (result.num_problems, result.num_samples, result.num_without_verdict) == (3, 4, 2)
    assert result.pass_at == pytest.approx({1: 5 / 12, 2: (5 / 6 + 0 + 1) / 3, 4: 2 / 3})
    assert result.response_length == pytest.approx(15 / 12)
    assert result.cut_share == pytest.approx(1 / 12)
    assert result.as_row()["eval/pass@2"] == result.pass_at[2]


def test_pass_at_the_first_k():
    """Right at once, never, at once; sums are over the first k answers of a problem only."""
    assert evaluate(2, pass_kind="first").pass_at == pytest.approx({1: 2 / 3, 2: 2 / 3, 4: 2 / 3})
    assert [pass_at_first_k([False, False, True], k) for k in (1, 2, 3)] == [0, 0, 1]
