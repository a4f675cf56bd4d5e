"""The built-in engine against the plain forward pass, and against itself under other batches."""

import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM

from d3s_megatron.rollout import RolloutConfig, Sampling
from d3s_megatron.rollout.transformers_engine import TransformersEngine

EOS = 12
FAMILIES = ("qwen2-tied", "qwen2-untied", "qwen3-tied", "llama", "mistral-window")


def answers(rollouts):
    return [(r.request.uid, r.token_ids, r.finish_reason) for r in rollouts]


def flat_log_probs(rollouts):
    return torch.tensor([x for r in rollouts for x in r.log_probs])


def set_eos_bias(engine, value):
    """Adds a constant to the end-of-sequence logit, through a bias that the head does not have otherwise."""
    head = engine._model.get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.zeros(head.out_features), requires_grad=False)
    head.bias[EOS] = value


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_those_of_a_full_forward_pass(folder, engine, requests_for, family):
    temperature = 0.7
    rollouts = engine(family).generate(requests_for(8), Sampling(temperature, max_new_tokens=20))
    model = AutoModelForCausalLM.from_pretrained(folder(family), dtype=torch.float32)
    assert len({r.token_ids for r in rollouts}) > 12
    for r in rollouts:
        prompt, length = r.request.prompt.token_ids, len(r.token_ids)
        logits = model(torch.tensor([prompt + r.token_ids])).logits[0, len(prompt) - 1 : -1]
        expected = (logits / temperature).log_softmax(-1)[range(length), r.token_ids]
        torch.testing.assert_close(torch.tensor(r.log_probs), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_neither_batch_size_nor_order_changes_an_answer(engine, requests_for, family):
    requests, sampling = requests_for(6), Sampling(max_new_tokens=16)
    whole = engine(family).generate(requests, sampling)
    assert [r.request for r in whole] == requests
    for size in (1, 4, 7):
        parts = engine(family, max_batch_size=size).generate(requests, sampling)
        assert answers(parts) == answers(whole)
        torch.testing.assert_close(flat_log_probs(parts), flat_log_probs(whole), rtol=1e-5, atol=1e-5)
    shuffled = requests[::-2] + requests[-2::-2]
    again = engine(family).generate(shuffled, sampling)
    assert [r.request for r in again] == shuffled
    assert sorted(answers(again)) == answers(whole)


@pytest.mark.parametrize("family", FAMILIES)
def test_left_padding_changes_nothing(engine, requests_for, family):
    """Fault D20: the same prompt with 0 and with 3 pads before it."""
    short, long = (5, 10, 6, 11), (1, 2, 10, 3, 4, 11, 0)
    alone = engine(family).generate(requests_for(4, [short]), Sampling(max_new_tokens=12))
    beside = engine(family).generate(requests_for(4, [short, long]), Sampling(max_new_tokens=12))[:4]
    assert answers(alone) == answers(beside)
    torch.testing.assert_close(flat_log_probs(alone), flat_log_probs(beside), rtol=1e-5, atol=1e-5)


def test_the_end_is_kept_once_and_never_invented(engine, requests_for):
    """Fault G05."""
    tiny = engine("qwen2-untied")
    set_eos_bias(tiny, 3.0)
    rollouts = tiny.generate(requests_for(64), Sampling(max_new_tokens=6))
    assert {r.finish_reason for r in rollouts} == {"stop", "length"}
    for r in rollouts:
        assert len(r.log_probs) == len(r.token_ids) and EOS not in r.token_ids[:-1]
        if r.finish_reason == "stop":
            assert r.token_ids[-1] == EOS
        else:
            assert len(r.token_ids) == 6 and r.token_ids[-1] != EOS
        assert r.text == "".join("0123456789+="[i] for i in r.token_ids if i < EOS)
    # An answer that ends with its very last token stopped: it was not cut.
    assert any(r.finish_reason == "stop" and len(r.token_ids) == 6 for r in rollouts)


def test_rows_that_leave_the_batch_do_not_disturb_the_others(engine, requests_for):
    tiny = engine("qwen2-untied")
    set_eos_bias(tiny, 3.0)
    alone = engine("qwen2-untied", max_batch_size=1)
    set_eos_bias(alone, 3.0)
    requests, sampling = requests_for(20), Sampling(max_new_tokens=40)
    together, single = tiny.generate(requests, sampling), alone.generate(requests, sampling)
    lengths = [len(r.token_ids) for r in together]
    assert min(lengths) <= 2 and max(lengths) > 10  # so that rows left at many different steps
    assert answers(together) == answers(single)
    torch.testing.assert_close(flat_log_probs(together), flat_log_probs(single), rtol=1e-5, atol=1e-5)


def test_prompts_run_in_parts_without_a_trace(engine, requests_for, monkeypatch):
    requests, sampling = requests_for(3), Sampling(max_new_tokens=5)
    whole = engine().generate(requests, sampling)
    monkeypatch.setattr("d3s_megatron.rollout.transformers_engine._PREFILL_TOKENS", 14)  # two prompts of seven
    parts = engine().generate(requests, sampling)
    assert answers(parts) == answers(whole)
    torch.testing.assert_close(flat_log_probs(parts), flat_log_probs(whole), rtol=1e-5, atol=1e-5)


def test_half_precision_weights_give_float_log_probs_near_the_full_ones(folder, engine, requests_for):
    half = engine(dtype="bfloat16").generate(requests_for(4), Sampling(max_new_tokens=6))
    model = AutoModelForCausalLM.from_pretrained(folder(), dtype=torch.float32)
    differences = []
    for r in half:
        prompt = r.request.prompt.token_ids
        logits = model(torch.tensor([prompt + r.token_ids])).logits[0, len(prompt) - 1 : -1]
        full = logits.log_softmax(-1)[range(len(r.token_ids)), r.token_ids]
        differences += (torch.tensor(r.log_probs) - full).abs().tolist()
    assert 0 < sum(differences) / len(differences) < 0.1


def test_several_end_tokens(folder, engine, requests_for, tmp_path):
    for file in folder().iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, 3]}))
    rollouts = TransformersEngine(tmp_path, RolloutConfig()).generate(requests_for(20), Sampling(max_new_tokens=30))
    ends = {r.token_ids[-1] for r in rollouts if r.finish_reason == "stop"}
    assert ends == {EOS, 3}
    assert not any({EOS, 3} & set(r.token_ids[:-1]) for r in rollouts)


def test_greedy_takes_the_likeliest_token_and_reports_it_at_temperature_1(folder, engine, requests_for):
    rollouts = engine().generate(requests_for(2), Sampling(temperature=0, max_new_tokens=8))
    assert rollouts[0].token_ids == rollouts[1].token_ids
    model = AutoModelForCausalLM.from_pretrained(folder(), dtype=torch.float32)
    for r in rollouts:
        prompt = r.request.prompt.token_ids
        log_probs = model(torch.tensor([prompt + r.token_ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        assert log_probs.argmax(-1).tolist() == list(r.token_ids)
        torch.testing.assert_close(torch.tensor(r.log_probs), log_probs.max(-1).values, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_loaded_weights_answer_as_the_model_they_came_from(folder, engine, requests_for, family):
    """Fault G04: no answer of the old weights is left."""
    requests, sampling = requests_for(6), Sampling(max_new_tokens=10)
    tiny = engine(family, seed=0)
    before = tiny.generate(requests, sampling)
    source = AutoModelForCausalLM.from_pretrained(folder(family, seed=1), dtype=torch.float32)
    tiny.load_weights(reversed(list(source.named_parameters())))
    after, fresh = tiny.generate(requests, sampling), engine(family, seed=1).generate(requests, sampling)
    assert answers(after) != answers(before)
    assert (answers(after), flat_log_probs(after).tolist()) == (answers(fresh), flat_log_probs(fresh).tolist())


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("qwen2-tied", lambda w: [*w, ("model.extra", torch.zeros(1))], "'model.extra' is unknown"),
        ("qwen2-tied", lambda w: [*w, ("lm_head.weight", w[0][1])], "'lm_head.weight' is unknown"),
        ("qwen2-untied", lambda w: [x for x in w if x[0] != "lm_head.weight"], "1 weights never came, among them"),
        ("llama", lambda w: [*w, w[3]], "came twice in one stream"),
        ("llama", lambda w: [(w[0][0], w[0][1][:-1]), *w[1:]], "has shape (15, 32); the engine needs (16, 32)"),
    ],
)
def test_a_wrong_stream_is_named_and_no_half_model_answers(engine, requests_for, family, change, message):
    tiny = engine(family)
    weights = [(name, tensor.clone()) for name, tensor in tiny._model.named_parameters()]
    with pytest.raises(ValueError, match=re.escape(message)):
        tiny.load_weights(change(weights))
    with pytest.raises(RuntimeError, match="no whole set of weights"):
        tiny.generate(requests_for(1), Sampling(max_new_tokens=1))
    tiny.load_weights(weights)
    assert len(tiny.generate(requests_for(1), Sampling(max_new_tokens=1))) == 3


def test_edges_of_a_call(engine, requests_for, tmp_path):
    tiny = engine()
    assert tiny.generate([], Sampling()) == []
    with pytest.raises(ValueError, match=r"prompt 'p0' has 4 tokens; .* over the model's 64 positions"):
        tiny.generate(requests_for(1), Sampling(max_new_tokens=61))
    with pytest.raises(ValueError, match="prompt 'p0' has no tokens"):
        tiny.generate(requests_for(1, [()]), Sampling(max_new_tokens=1))
    with pytest.raises(ValueError, match="no config.json there"):
        TransformersEngine(tmp_path, RolloutConfig())
    tiny.close()
    with pytest.raises(RuntimeError, match="it was closed"):
        tiny.generate(requests_for(1), Sampling(max_new_tokens=1))
