import math
from collections import Counter
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from d3s_megatron.evaluate import maj_at_k, pass_at_first_k, pass_at_k
from d3s_megatron.evaluate.estimators import estimate, resampled_means


@pytest.mark.parametrize("num_samples", range(1, 9))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(num_samples):
    for num_correct in range(num_samples + 1):
        for k in range(1, num_samples + 1):
            subsets = list(combinations(range(num_samples), k))
            solved = sum(min(subset) < num_correct for subset in subsets)  # the first ones are right
            assert pass_at_k(num_samples, num_correct, k) == pytest.approx(solved / len(subsets), abs=1e-12)


@given(st.integers(1, 200), st.data())
def test_pass_at_k_in_closed_form(num_samples, data):
    correct = data.draw(st.integers(0, num_samples))
    k = data.draw(st.integers(1, num_samples))
    value = pass_at_k(num_samples, correct, k)
    # The chance that k draws one after another all miss.
    missed = math.prod((num_samples - correct - i) / (num_samples - i) for i in range(k))
    assert value == pytest.approx(1 - max(0.0, missed), abs=1e-12)
    assert 0 <= value <= 1
    assert (value == 0) == (correct == 0)
    assert pass_at_k(num_samples, correct, 1) == pytest.approx(correct / num_samples)  # avg@n
    assert value >= pass_at_k(num_samples, correct, max(1, k - 1)) - 1e-12


@pytest.mark.parametrize("k", [0, 5])
@pytest.mark.parametrize("function", [lambda k: pass_at_k(4, 2, k), lambda k: maj_at_k("abca", [True] * 4, k)])
def test_more_draws_than_samples_are_refused(function, k):
    with pytest.raises(ValueError, match=f"k is {k} with 4 samples"):
        function(k)


def test_pass_at_the_first_k():
    assert [pass_at_first_k([False, False, True], k) for k in (1, 2, 3)] == [0, 0, 1]


@pytest.mark.parametrize(
    ("votes", "right", "k", "expected"),
    [
        ("aabc", "a", 4, 1),  # two of four
        ("abbc", "a", 4, 0),
        ("abba", "a", 4, 1),  # a tie falls to the answer that came first
        ("baab", "a", 4, 0),
        ("a---", "a", 4, 1),  # who says nothing does not vote
        ("----", "a", 4, 0),
        ("abcd", "a", 1, 1 / 4),  # one draw is an answer by chance
        ("abb-", "a", 2, 3 / 6),  # ab, ab and a- of six draws; ab is a tie
        ("bab-", "b", 2, 5 / 6),  # all but a-
    ],
)
def test_majority_by_hand(votes, right, k, expected):
    votes = [None if vote == "-" else vote for vote in votes]
    assert maj_at_k(votes, [vote == right for vote in votes], k) == pytest.approx(expected, abs=1e-15)


def test_an_answer_counts_by_its_first_sample_with_a_verdict():
    assert maj_at_k("aaab", [None, True, False, False], 4) == 1
    assert maj_at_k("aaab", [None, None, None, True], 4) == 0


def winner(votes, subset):
    counts = Counter(votes[i] for i in subset if votes[i] is not None)
    order = list(dict.fromkeys(votes))
    return min(counts, key=lambda vote: (-counts[vote], order.index(vote)), default=None)


@given(st.lists(st.sampled_from(["a", "b", "c", None]), min_size=1, max_size=8), st.sets(st.sampled_from("abc")))
def test_majority_over_every_subset(votes, right):
    solved = [vote in right for vote in votes]
    for k in range(1, len(votes) + 1):
        subsets = list(combinations(range(len(votes)), k))
        won = sum(winner(votes, subset) in right for subset in subsets)
        assert maj_at_k(votes, solved, k) == pytest.approx(won / len(subsets), abs=1e-12)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=100))
def test_some_answer_wins_every_draw(votes):
    for k in {1, (len(votes) + 1) // 2, len(votes)}:
        total = sum(maj_at_k(votes, [vote == right for vote in votes], k) for right in set(votes))
        assert total == pytest.approx(1, abs=1e-9)


def test_intervals_of_a_hand_made_case():
    """Two problems, 0 and 1: a draw's mean is 0, 1/2 or 1 with 1/4, 1/2, 1/4."""
    means = resampled_means(torch.tensor([0.0, 1.0]), seed=0, name="x", num=4000)
    assert sorted(set(means.tolist())) == [0, 0.5, 1]
    assert [float((means == m).double().mean()) for m in (0, 0.5, 1)] == pytest.approx([0.25, 0.5, 0.25], abs=0.03)
    interval = estimate(0.5, means)
    assert (interval.value, interval.low, interval.high) == (0.5, 0.0, 1.0)
    interval = estimate(0.5, torch.arange(100).double(), confidence=0.9)
    assert (interval.low, interval.high) == (5, 94)  # the middle 90 of 100


def test_interval_is_as_wide_as_the_normal_approximation_says():
    values = (torch.arange(400) % 4 == 0).double()
    interval = estimate(0.25, resampled_means(values, 3, "gsm8k"))
    half = 1.96 * math.sqrt(0.25 * 0.75 / 400)
    assert interval.low == pytest.approx(0.25 - half, abs=0.006)
    assert interval.high == pytest.approx(0.25 + half, abs=0.006)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.integers(0, 1 << 40))
def test_draws_are_a_function_of_seed_and_name(values, seed):
    values = torch.tensor(values, dtype=torch.float64)
    means = resampled_means(values, seed, "a", num=50)
    assert torch.equal(means, resampled_means(values, seed, "a", num=50))
    assert means.min() >= values.min() - 1e-12 and means.max() <= values.max() + 1e-12


def test_another_set_has_draws_of_its_own():
    values = torch.arange(9.0)
    assert not torch.equal(resampled_means(values, 0, "a"), resampled_means(values, 0, "b"))
