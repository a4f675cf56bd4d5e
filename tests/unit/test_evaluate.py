import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d3s_megatron.evaluate import Answer, evaluate_policy, rank_share, summarise
from d3s_megatron.evaluate.summary import average
from d3s_megatron.evaluate.votes import MAX_CLEANED, vote_of
from d3s_megatron.rewards import Reward, RewardConfig
from d3s_megatron.rollout import Sampling
from d3s_megatron.types import Prompt, Rollout, Verdict


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
        kinds = {"r": Verdict(1.0, "right"), "?": Verdict(math.nan, "timeout")}
        return [kinds.get(text[0], Verdict(0.0, "wrong")) for text, _ in items]


ANSWERS = [["r", "w", "w", "r~"], ["w", "?", "w", "w"], ["r", "r", "r", "?xx"]]
PROMPTS = [Prompt(str(i), "", (1,), "r") for i in range(3)]
EXACT = RewardConfig(kind="exact")


def evaluate(world_size, **options):
    """Every rank's share in turn, then the evaluation over the joined rows."""

    def share(rank, gather):
        ranks = rank_share(3, rank, world_size)
        return evaluate_policy(
            Table(ANSWERS), Letter(), PROMPTS, 4, Sampling(), 0, ranks, gather, rewards=EXACT, **options
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


def values(estimates):
    return {k: one.value for k, one in estimates.items()}


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_evaluation_over_ranks(world_size):
    result = evaluate(world_size)
    assert (result.num_problems, result.num_samples, result.num_without_verdict) == (3, 4, 2)
    assert values(result.pass_at) == pytest.approx({1: 5 / 12, 2: (5 / 6 + 0 + 1) / 3, 4: 2 / 3})
    # Of r w w r~ three draws of two are won by r, which came first; r~ is another right answer, and loses to w.
    assert values(result.maj_at) == pytest.approx({2: (3 / 6 + 0 + 1) / 3, 4: 1 / 3})
    assert result.response_length == pytest.approx(15 / 12)
    assert result.cut_share == pytest.approx(1 / 12)
    assert {k: v for k, v in result.statuses.items() if v} == {"right": 5, "wrong": 5, "timeout": 2}
    row = result.as_row()
    assert row["eval/pass@2"] == result.pass_at[2].value and row["eval/rewards/timeout"] == 2
    assert row["eval/accuracy_low"] <= row["eval/pass@1"] <= row["eval/accuracy_high"]
    assert result == evaluate(1)


def test_pass_at_the_first_k():
    """Right at once, never, at once; sums are over the first k answers of a problem only."""
    assert values(evaluate(2, pass_kind="first").pass_at) == pytest.approx({1: 2 / 3, 2: 2 / 3, 4: 2 / 3})


def answer(solved, vote="x"):
    return Answer(solved, "right" if solved else "wrong", vote, num_tokens=3, cut=False)


def test_average_gives_every_set_the_same_weight_and_needs_a_column_in_all():
    small = summarise("small", [[answer(True), answer(False)]], (1, 2), seed=0)
    large = summarise("large", [[answer(False)]] * 9 + [[answer(True)]], (1, 2), seed=0)
    both = average([small, large])
    assert list(both) == ["pass@1"]
    assert both["pass@1"].value == pytest.approx((0.5 + 0.1) / 2)
    assert both["pass@1"].low == pytest.approx(0.25) and both["pass@1"].high < 0.45  # a problem alone does not vary


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (r"\boxed{0.5}", r"\boxed{\frac12}", True),
        (r"\boxed{1,000}", r"so \boxed{1000}.", True),
        (r"\boxed{\dfrac{x}{2}}", r"\boxed{ \frac{x}{2} }", True),
        (r"\boxed{12}", r"\boxed{13}", False),
        (r"\boxed{x+1}", r"\boxed{1+x}", False),
        (r"\boxed{2 3/4}", r"\boxed{23/4}", False),
        (r"\boxed{10^{4999}}", r"\boxed{10^{4998}}", False),
    ],
)
def test_answers_vote_together(one, other, same):
    first, second = (vote_of(text, RewardConfig()) for text in (one, other))
    assert first is not None and second is not None
    assert (first == second) == same


def test_who_says_nothing_does_not_vote_and_long_answers_vote_as_they_are():
    assert vote_of("no idea, perhaps 12", RewardConfig()) is None
    assert vote_of("12", RewardConfig(kind="reward_functions:always")) == "12"
    assert vote_of(" 046 ", EXACT) == "046" and vote_of("  ", EXACT) is None
    assert vote_of(r"\boxed{5}", RewardConfig(kind="mixture", mixture={"math_verify": 1.0})) == "5"
    assert vote_of("5", RewardConfig(kind="mixture", mixture={"math_verify": 1.0})) is None
    long = "x+" * MAX_CLEANED + "x"
    assert vote_of(rf"\boxed{{{long}}}", RewardConfig()) == long
