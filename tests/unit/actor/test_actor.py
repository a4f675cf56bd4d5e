"""One actor in the test process: switches that leave the gradient alone, precision, steps that must not be taken."""

import math
from dataclasses import replace

import pytest
import torch
from builders import random_samples, tiny_model

from d3s_megatron.actor.config import ActorConfig, OptimizerConfig
from d3s_megatron.actor.megatron_actor import MegatronActor
from d3s_megatron.actor.parallel import init_parallel, shutdown
from d3s_megatron.algorithms.loss_batch import StepTensors
from d3s_megatron.algorithms.normalization import kept_counts, token_weights
from d3s_megatron.algorithms.policy_loss import METRICS, PolicyLoss
from d3s_megatron.types import Scores

LOSS = PolicyLoss("token", 0.2, 0.2, None, 0.05, "k2")
KEPT_SAMPLES, NUM_SAMPLES = 7, 12


@pytest.fixture(scope="module")
def make_actor(tmp_path_factory):
    """MegatronActor of a tiny model in a world of one."""
    folder = tiny_model(tmp_path_factory.mktemp("actor") / "model")
    layout = init_parallel(ActorConfig())

    def make(optimizer: OptimizerConfig | None = None, **config) -> MegatronActor:
        return MegatronActor(
            str(folder), ActorConfig(**config), optimizer or OptimizerConfig(lr=0.0), layout, 0.7, 10, True
        )

    yield make
    shutdown()


def update(actor, num_samples=NUM_SAMPLES, advantage=1.0):
    """One step on the first samples; only some tokens of the first seven are kept."""
    samples = [replace(s, advantage=s.advantage * advantage) for s in random_samples(num_samples, seed=2, per_prompt=3)]
    generator = torch.Generator().manual_seed(3)
    keep = [torch.rand(len(s.response_ids), generator=generator) < 0.4 for s in samples]
    keep = [mask if i < KEPT_SAMPLES else torch.zeros_like(mask) for i, mask in enumerate(keep)]
    keep[0][0] = keep[1][0] = True  # one row of their prompt predicts both
    old = [torch.full((len(mask),), -2.0) for mask in keep]
    scores = [Scores(values, values, values - 0.5) for values in old]
    weights = token_weights("token_mean", keep, 9, kept_counts(keep))
    tensors = StepTensors(samples, scores, keep, keep, weights, weights)
    return actor.update(samples, keep, tensors.loss_batch, LOSS, len(METRICS))


def gradients(actor):
    return {name: grad.clone() for name, grad in actor.gradients()}


MASKING = {"gather_rows": False, "truncate_samples": False, "share_prompts": False}


@pytest.fixture(scope="module")
def masked(make_actor):
    """Gradients of what others do: samples whole, each with its prompt, all rows through the output layer, masked."""
    actor = make_actor(**MASKING)
    result = update(actor)
    return result, gradients(actor)


@pytest.mark.parametrize(
    ("config", "num_samples"),
    [
        ({"truncate_samples": False}, NUM_SAMPLES),
        ({"gather_rows": False}, NUM_SAMPLES),
        ({"share_prompts": False}, NUM_SAMPLES),
        (MASKING, KEPT_SAMPLES),  # dropped samples never enter the update
        ({}, NUM_SAMPLES),
        ({"max_tokens_per_microbatch": 12}, NUM_SAMPLES),
        ({"recompute": "selective"}, NUM_SAMPLES),
        ({"recompute": "full"}, NUM_SAMPLES),
    ],
)
def test_what_saves_compute_leaves_the_gradient_of_plain_masking(config, num_samples, make_actor, masked):
    actor = make_actor(**config)
    result = update(actor, num_samples)
    assert torch.allclose(result.totals, masked[0].totals, rtol=1e-5)
    for name, grad in gradients(actor).items():
        want = masked[1][name]
        assert want.norm() > 0
        assert (grad - want).norm() <= 1e-5 * max(want.norm(), 1e-2 * result.grad_norm), name


def test_logits_that_do_not_fit_are_made_in_tiles_with_the_same_gradient(make_actor, masked):
    actor = make_actor()
    actor.head = replace(actor.head, max_logits_bytes=1)
    assert torch.allclose(update(actor).totals, masked[0].totals, rtol=1e-5)
    for name, grad in gradients(actor).items():
        assert (grad - masked[1][name]).norm() <= 1e-5 * max(masked[1][name].norm(), 1e-2 * masked[0].grad_norm), name


def test_scores_do_not_depend_on_row_chunks_packing_or_neighbours(make_actor):
    """Faults C08 and C13: a sample's values are its own, in whatever row and next to whomever it stands."""
    samples = random_samples(8, seed=4, per_prompt=4)
    actor = make_actor()
    together = actor.score(samples)
    actor.head = replace(actor.head, max_logits_bytes=1)
    chunked = actor.score(samples)
    alone = make_actor(max_tokens_per_microbatch=1).score(samples)
    others = [samples[0], *(replace(s, prompt_ids=(3, 3), response_ids=(1, 1)) for s in samples[1:])]
    beside_others = make_actor().score(others)
    for i, want in enumerate(together):
        for got in (chunked[i], alone[i]) + ((beside_others[0],) if i == 0 else ()):
            assert torch.allclose(got.old_log_probs, want.old_log_probs, atol=1e-5)
            assert torch.allclose(got.entropy, want.entropy, atol=1e-5)
            assert torch.allclose(got.ref_log_probs, want.old_log_probs, atol=1e-5)  # the reference is the first policy


def test_an_update_without_old_log_probs_takes_its_own_and_gives_the_scores(make_actor):
    samples = random_samples(8, seed=4, per_prompt=4)
    everything = [torch.ones(len(s.response_ids), dtype=torch.bool) for s in samples]
    weights = token_weights("seq_mean_full", everything, 9, kept_counts(everything))
    loss = PolicyLoss("sequence", 0.2, 0.2, None, 0.0, "k2")
    results = []
    for late in (True, False):
        actor = make_actor(max_tokens_per_microbatch=30)
        scores = actor.score(samples, with_reference=False)
        tensors = StepTensors(samples, None if late else scores, everything, everything, weights, weights)
        results.append((actor.update(samples, everything, tensors.loss_batch, loss, len(METRICS)), gradients(actor)))
    (result, grads), (before, want) = results
    assert before.scores is None and len(result.scores) == len(samples)
    for one, other in zip(result.scores, scores, strict=True):
        torch.testing.assert_close(one.old_log_probs, other.old_log_probs)
        torch.testing.assert_close(one.entropy, other.entropy)
    assert torch.allclose(result.totals, before.totals, rtol=1e-5, atol=1e-6)
    for name, grad in grads.items():
        assert (grad - want[name]).norm() <= 1e-5 * max(want[name].norm(), 1e-2 * before.grad_norm), name


def test_scores_in_bfloat16_agree_between_row_sizes(make_actor):
    """Fault C16: 8 bits of precision leave a tenth of a nat at these logits, no more."""
    samples = random_samples(8, seed=4)
    together = make_actor(dtype="bfloat16").score(samples)
    alone = make_actor(dtype="bfloat16", max_tokens_per_microbatch=1).score(samples)
    for got, want in zip(alone, together, strict=True):
        assert torch.allclose(got.old_log_probs, want.old_log_probs, atol=0.1)


@pytest.mark.parametrize("split", [False, True])
def test_main_weights_are_those_that_were_loaded(split, make_actor):
    """Fault E07: a step of nothing leaves what was loaded; small ones add up in main weights of float32."""
    before = {name: weight.clone() for name, weight in make_actor(dtype="bfloat16").weights()}
    settings = {"dtype": "bfloat16", "use_distributed_optimizer": split}
    still = make_actor(**settings)
    assert update(still).stepped
    assert all(torch.equal(weight, before[name]) for name, weight in still.weights())
    moving = make_actor(OptimizerConfig(lr=1e-6, weight_decay=0.0), **settings)
    for _ in range(200):
        update(moving)
    moved = {name: weight.clone() for name, weight in moving.weights()}
    assert not all(torch.equal(moved[name], before[name]) for name in before)  # 200 steps that bfloat16 would lose
    assert all((moved[name].float() - before[name].float()).abs().max() < 1e-2 for name in before)


def test_a_gradient_that_is_not_finite_changes_no_weight(make_actor):
    actor = make_actor(OptimizerConfig(lr=1.0))
    before = {name: weight.clone() for name, weight in actor.weights()}
    result = update(actor, advantage=math.nan)
    assert not result.stepped and not math.isfinite(result.totals[0])
    actor.chunks[0].decoder.final_layernorm.weight.register_hook(lambda grad: grad * math.inf)
    result = update(actor)
    assert not result.stepped and math.isfinite(result.totals[0]) and not math.isfinite(result.grad_norm)
    assert all(torch.equal(weight, before[name]) for name, weight in actor.weights())
    assert update(make_actor(OptimizerConfig(lr=1.0))).stepped


def test_clipping_can_be_switched_off(make_actor):
    clipped, free = make_actor(OptimizerConfig(clip_grad=1e-3)), make_actor(OptimizerConfig(clip_grad=0.0))
    assert update(clipped).grad_norm == update(free).grad_norm > 1e-3
    norms = [torch.stack([grad.norm() for _, grad in actor.gradients()]).norm() for actor in (clipped, free)]
    assert norms[0] < 2e-3 and norms[1] > 1e-2


def test_logits_of_the_update_are_proportional_to_the_kept_tokens(make_actor, monkeypatch):
    from d3s_megatron import ops

    sizes, right = [], ops.logprob_entropy
    monkeypatch.setattr(
        ops, "logprob_entropy", lambda logits, *a, **k: sizes.append(len(logits)) or right(logits, *a, **k)
    )
    result = update(make_actor())
    assert sum(sizes) == int(result.totals[1])  # METRICS[0], the kept tokens
    sizes.clear()
    update(make_actor(**MASKING))
    assert sum(sizes) > 4 * int(result.totals[1])


@pytest.mark.parametrize(
    "settings", [{}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "use_distributed_optimizer": True}]
)
def test_a_stay_on_the_host_changes_no_later_step(settings, make_actor):
    """The moves themselves need a GPU; freed gradient buffers and the way back are the same on a CPU."""
    stayed, moved = (make_actor(OptimizerConfig(lr=1e-2), **settings) for _ in range(2))
    for actor in (stayed, moved):
        update(actor)
    moved.host.offload()
    moved.host.offload()
    assert moved.host.is_offloaded and moved.ddp[0].buffers[0].grad_data.untyped_storage().size() == 0
    results = [update(actor) for actor in (stayed, moved)]
    assert not moved.host.is_offloaded
    assert torch.equal(results[0].totals, results[1].totals)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(stayed.weights(), moved.weights(), strict=True))
