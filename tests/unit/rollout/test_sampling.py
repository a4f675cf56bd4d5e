"""Drawing tokens: the right frequencies, from the request's own seed, and never a token of probability 0."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from d3s_megatron.rollout import RolloutConfig, Sampling, make_requests
from d3s_megatron.rollout.sampling import sample_tokens, uniforms
from d3s_megatron.types import Prompt

LOGITS = torch.tensor([2.0, -torch.inf, 1.0, 0.0, -1.0, -torch.inf, 0.5])


def draw(num, sampling, logits=LOGITS, position=0):
    seeds = torch.arange(num) * 1_000_003 - 5
    return sample_tokens(logits.expand(num, -1), seeds, position, sampling)


@pytest.mark.parametrize("position", [0, 1, 777])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_match_the_probabilities(temperature, position):
    num = 20_000
    ids, log_probs = draw(num, Sampling(temperature), position=position)
    expected = (LOGITS / temperature).softmax(-1)
    counts = torch.bincount(ids, minlength=len(LOGITS))
    assert counts[[1, 5]].tolist() == [0, 0]
    possible = expected > 0
    chi_square = ((counts - num * expected)[possible] ** 2 / (num * expected[possible])).sum()
    assert chi_square < 18.5  # 4 degrees of freedom: 0.1% of fair samplers are above; the seeds are fixed
    torch.testing.assert_close(log_probs, (LOGITS / temperature).log_softmax(-1)[ids])


def test_two_positions_of_one_seed_are_independent():
    num = 20_000
    first, second = (draw(num, Sampling(), torch.zeros(4), position=p)[0] for p in (0, 1))
    counts = torch.bincount(first * 4 + second, minlength=16)
    assert ((counts - num / 16) ** 2 / (num / 16)).sum() < 37.7  # 15 degrees of freedom, 0.1%


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({"top_k": 1}, [0]),
        ({"top_k": 3}, [0, 2, 6]),
        ({"top_p": 0.5}, [0]),  # probabilities: 0.563 0.207 0.126 0.076 0.028
        ({"top_p": 0.6}, [0, 2]),
        ({"top_p": 0.9, "top_k": 2}, [0, 2]),
        ({"top_p": 1e-9}, [0]),
    ],
)
def test_top_k_and_top_p_cut_and_renormalise(options, allowed):
    ids, log_probs = draw(2_000, Sampling(**options))
    assert sorted(set(ids.tolist())) == allowed
    expected = torch.full_like(LOGITS, -torch.inf)
    expected[allowed] = LOGITS[allowed]
    torch.testing.assert_close(log_probs, expected.log_softmax(-1)[ids])


def test_greedy():
    ids, log_probs = draw(3, Sampling(temperature=0))
    assert ids.tolist() == [0, 0, 0]
    torch.testing.assert_close(log_probs, LOGITS.log_softmax(-1)[ids])


@settings(deadline=None)
@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20), st.integers(0, 10**6))
def test_uniforms_are_in_range_and_belong_to_their_row(seeds, position):
    values = uniforms(torch.tensor(seeds), position)
    assert values.dtype == torch.float64 and bool(((values >= 0) & (values < 1)).all())
    for i, seed in enumerate(seeds):
        assert uniforms(torch.tensor([seed]), position)[0] == values[i]


@settings(deadline=None)
@given(st.lists(st.floats(-30, 30), min_size=1, max_size=40), st.integers(0, 2**62))
def test_a_draw_is_always_a_possible_token(logits, seed):
    logits = torch.tensor([[-torch.inf, *logits, -torch.inf]])
    ids, log_probs = sample_tokens(logits, torch.tensor([seed]), 0, Sampling())
    assert 1 <= ids[0] <= logits.shape[1] - 2 and bool(log_probs.isfinite().all())


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 1), (1 - 2.0**-52, 4)])
def test_the_ends_of_the_unit_interval_draw_possible_tokens(monkeypatch, uniform, token):
    monkeypatch.setattr(
        "d3s_megatron.rollout.sampling.uniforms", lambda seeds, _: torch.full((1,), uniform, dtype=torch.float64)
    )
    logits = torch.tensor([[-torch.inf, 0.3, -torch.inf, 1.0, 0.7, -torch.inf]])
    assert sample_tokens(logits, torch.tensor([0]), 0, Sampling())[0].item() == token


def test_half_precision_logits_are_sampled_in_float():
    logits = LOGITS.to(torch.bfloat16)
    same = draw(100, Sampling(0.7), logits.float())
    for got, expected in zip(draw(100, Sampling(0.7), logits), same, strict=True):
        assert torch.equal(got, expected)


def test_large_batches_are_cut_without_a_trace(monkeypatch):
    whole = draw(100, Sampling())
    monkeypatch.setattr("d3s_megatron.rollout.sampling._ELEMENTS_AT_ONCE", 50)
    for got, expected in zip(draw(100, Sampling()), whole, strict=True):
        assert torch.equal(got, expected)


def test_requests_of_a_rank_are_those_of_the_whole_batch():
    prompts = [Prompt(id=str(i), text="", token_ids=(i,), answer="") for i in range(4)]
    whole = make_requests(prompts, 3, seed=1, step=2)
    assert [r.uid for r in whole] == list(range(12))
    assert [r.group_id for r in whole] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert make_requests([prompts[3], prompts[1]], 3, 1, 2, [3, 1]) == whole[9:] + whole[3:6]
    assert make_requests([], 3, 1, 2, []) == []
    others = make_requests(prompts, 3, seed=1, step=3) + make_requests(prompts, 3, seed=2, step=2)
    assert len({r.seed for r in whole + others}) == 36


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "rollout.temperature is 0.0: training samples at a temperature above 0"),
        ({"temperature": float("nan")}, "rollout.temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_k": -1}, "top_k is -1"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_batch_size": 0}, "rollout.max_batch_size is 0"),
        ({"engine": "sglang"}, "rollout.engine is 'sglang'"),
        ({"dtype": "int8"}, "rollout.dtype is 'int8'"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        RolloutConfig(**options)
