"""Gradients added to megatron-core's buffer in the backward pass against those that autograd makes and a hook adds."""

from dataclasses import replace

import pytest
import torch
from builders import random_samples, tiny_model

from d3s_megatron.actor import main_grad, model, passes
from d3s_megatron.actor.config import ActorConfig, OptimizerConfig
from d3s_megatron.actor.megatron_actor import MegatronActor
from d3s_megatron.actor.parallel import init_parallel, shutdown
from d3s_megatron.algorithms.loss_batch import StepTensors
from d3s_megatron.algorithms.normalization import kept_counts, token_weights
from d3s_megatron.algorithms.policy_loss import METRICS, PolicyLoss
from d3s_megatron.types import Scores

LOSS = PolicyLoss("token", 0.2, 0.2, None, 0.0, "k2")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("main_grad")
    return {tied: str(tiny_model(root / str(tied), tie_word_embeddings=tied)) for tied in (True, False)}


@pytest.fixture(scope="module")
def layout():
    yield init_parallel(ActorConfig())
    shutdown()


def buffers(folder, layout, logits=2**30, **config):
    """What two updates leave in the gradient buffers: the second must start from nothing."""
    actor = MegatronActor(folder, ActorConfig(**config), OptimizerConfig(lr=0.0, clip_grad=0.0), layout, 0.7, 10)
    actor.head = replace(actor.head, max_logits_bytes=logits)
    samples = random_samples(12, seed=2, per_prompt=3)
    keep = [torch.arange(len(s.response_ids)) % 2 == 0 for s in samples]
    old = [torch.full((len(mask),), -2.0) for mask in keep]
    weights = token_weights("token_mean", keep, 9, kept_counts(keep))
    tensors = StepTensors(samples, [Scores(values, values, None) for values in old], keep, keep, weights, weights)
    for _ in range(2):
        assert actor.update(samples, keep, tensors.loss_batch, LOSS, len(METRICS)).stepped
    return torch.cat([buffer.grad_data.clone() for buffer in actor.ddp[0].buffers])


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_tokens_per_microbatch": 20},
        {"max_tokens_per_microbatch": 20, "overlap_grad_reduce": True},
        {"logits": 1},
        {"gather_rows": False},
        {"recompute": "full"},
        {"use_distributed_optimizer": True, "overlap_grad_reduce": True},
        {"dtype": "bfloat16", "max_tokens_per_microbatch": 20},
        {"dtype": "bfloat16", "logits": 1},
    ],
)
@pytest.mark.parametrize("tied", [True, False])
def test_the_buffers_hold_the_gradients_that_autograd_makes(settings, tied, folders, layout, monkeypatch):
    made = buffers(folders[tied], layout, **settings)
    for module in (passes, main_grad):
        monkeypatch.setattr(module, "weight_and_buffer", lambda weight: (weight, None))
    monkeypatch.setattr(model, "fuses_weight_gradients", lambda config: False)
    want = buffers(folders[tied], layout, **settings)
    tolerance = (
        1e-2 if "dtype" in settings else 1e-6
    )  # bfloat16: autograd rounds every gradient, the buffer's is float32
    assert want.norm() > 0
    assert (made - want).norm() <= tolerance * want.norm()


def test_no_gradient_of_the_vocabulary_is_made(folders, layout):
    seen = []
    actor = MegatronActor(folders[True], ActorConfig(), OptimizerConfig(lr=0.0), layout, 1.0, 10)
    weight = actor.model.output_weight()
    weight.register_hook(seen.append)  # called with a gradient, if there is one
    samples = random_samples(4, seed=2)
    keep = [torch.ones(len(s.response_ids), dtype=torch.bool) for s in samples]
    weights = token_weights("token_mean", keep, 9, kept_counts(keep))
    old = [torch.full((len(mask),), -2.0) for mask in keep]
    tensors = StepTensors(samples, [Scores(values, values, None) for values in old], keep, keep, weights, weights)
    actor.update(samples, keep, tensors.loss_batch, LOSS, len(METRICS))
    assert all(grad is None for grad in seen) and weight.main_grad.norm() > 0
