"""The real vLLM on tiny models, behind the engine contract. Runs in an environment of its own: `make test-vllm`."""

import os

import pytest
import torch
from builders import tiny_model

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm runs these in an environment of its own")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from d3s_megatron.actor.config import ActorConfig  # noqa: E402
from d3s_megatron.actor.parallel import init_parallel, shutdown  # noqa: E402
from d3s_megatron.rollout import RolloutConfig, Sampling, make_requests  # noqa: E402
from d3s_megatron.rollout.vllm_engine import VllmEngine  # noqa: E402
from d3s_megatron.sync_probe import ROUNDED  # noqa: E402
from d3s_megatron.types import Prompt  # noqa: E402

TEMPERATURE = 0.7
# vLLM's CPU attention wants heads of 32 or more.
WIDE = {"hidden_size": 128, "intermediate_size": 64}
PROMPTS = [Prompt(str(i), "", ids, "") for i, ids in enumerate([(1, 10, 2), (3, 4, 10, 5, 11)])]


@pytest.fixture(scope="module", params=[("qwen2", True), ("llama", False)], ids=["qwen2-tied", "llama-untied"])
def engine_and_model(request, tmp_path_factory):
    from transformers import AutoModelForCausalLM

    family, tied = request.param
    folder = tiny_model(tmp_path_factory.mktemp(family), family, tie_word_embeddings=tied, **WIDE)
    init_parallel(ActorConfig())
    engine = VllmEngine(folder, RolloutConfig(engine="vllm", max_batch_size=16), max_model_len=64)
    yield engine, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    engine.close()
    shutdown()


@torch.no_grad()
def differences(rollouts, model):
    """Absolute, of every token's log-prob."""
    found = []
    for rollout in rollouts:
        prompt, answer = list(rollout.request.prompt.token_ids), list(rollout.token_ids)
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
        log_probs = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]
        found.append((log_probs - torch.tensor(rollout.log_probs)).abs())
    return torch.cat(found)


def largest_mismatch(rollouts, model):
    return float(differences(rollouts, model).max())


def generate(engine, step=0, num_samples=8):
    return engine.generate(make_requests(PROMPTS, num_samples, 3, step), Sampling(TEMPERATURE, 10))


@torch.no_grad()
def test_log_probs_are_the_trainers_before_and_after_new_weights(engine_and_model):
    """Fault G04, tied heads included."""
    engine, model = engine_and_model
    assert largest_mismatch(generate(engine), model) < 1e-3
    for parameter in model.parameters():
        parameter += 0.1 * torch.randn_like(parameter)
    engine.load_weights((name, tensor) for name, tensor in model.named_parameters())
    assert largest_mismatch(generate(engine), model) < 1e-3


def test_answers_follow_from_their_seeds(engine_and_model):
    engine, _ = engine_and_model
    first, again, other = generate(engine), generate(engine), generate(engine, step=1)
    assert [r.token_ids for r in first] == [r.token_ids for r in again]
    assert [r.token_ids for r in first] != [r.token_ids for r in other]
    assert len({r.token_ids for r in first[:8]}) > 2  # equal prompts, own seeds; the tiny model is sure of itself
    assert [r.request.uid for r in first] == list(range(16))


def test_an_answer_that_stopped_ends_in_eos_and_a_cut_one_does_not(engine_and_model):
    """Fault G05."""
    engine, _ = engine_and_model
    rollouts = generate(engine, num_samples=16)
    assert {r.finish_reason for r in rollouts} == {"stop", "length"}
    for rollout in rollouts:
        assert (rollout.token_ids[-1] == 12) == (rollout.finish_reason == "stop")
        assert 12 not in rollout.token_ids[:-1] and len(rollout.log_probs) == len(rollout.token_ids)


def test_a_wrong_stream_of_weights_is_refused(engine_and_model):
    engine, model = engine_and_model
    with pytest.raises(ValueError, match="unknown"):
        engine.load_weights([("model.layers.9.mlp.weight", torch.zeros(1))])
    with pytest.raises(RuntimeError, match="no whole set"):
        generate(engine)
    engine.load_weights((name, tensor.detach()) for name, tensor in model.named_parameters())
    generate(engine)


def test_in_bfloat16_old_weights_are_above_the_probes_tolerance_and_equal_ones_below(tmp_path):
    from transformers import AutoModelForCausalLM

    folder = tiny_model(tmp_path, **WIDE)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = RolloutConfig(engine="vllm", dtype="bfloat16", max_batch_size=16)
    engine = VllmEngine(folder, config, max_model_len=64, colocated=False)
    assert differences(generate(engine), model).mean() < ROUNDED
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    assert differences(generate(engine), model).mean() > 2 * ROUNDED
    engine.load_weights((name, tensor.detach()) for name, tensor in model.named_parameters())
    assert differences(generate(engine), model).mean() < ROUNDED
    engine.close()


def test_heads_that_vllm_does_not_take_are_named_before_it_starts(tmp_path):
    folder = tiny_model(tmp_path)  # heads of 8
    with pytest.raises(ValueError, match="heads have 8 units; vLLM without a GPU takes 32"):
        VllmEngine(folder, RolloutConfig(engine="vllm"), 64, colocated=False)


def test_the_doctor_knows_vllm_and_what_it_needs(monkeypatch):
    from d3s_megatron.doctor import environment

    assert "(vllm" in dict(environment.facts())["vllm"]
    assert not any("vllm" in what for what, _ in environment.conflicts())
    installed = environment.version
    monkeypatch.setattr(environment, "version", lambda name: "4.0" if name == "transformers" else installed(name))
    assert any("transformers is 4.0, vllm" in what for what, _ in environment.conflicts())
