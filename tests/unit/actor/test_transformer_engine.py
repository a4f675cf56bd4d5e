"""What Transformer Engine's layers are asked for, by stand-ins that do it with torch: the same update comes of it."""

import pytest
import torch
from builders import random_samples, tiny_model
from megatron.core.extensions import transformer_engine
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from d3s_megatron.actor import model
from d3s_megatron.actor.config import ActorConfig, OptimizerConfig
from d3s_megatron.actor.megatron_actor import MegatronActor
from d3s_megatron.actor.parallel import init_parallel, shutdown

BUILT = []


class Column(ColumnParallelLinear):
    """Transformer Engine's gathers no output, and allocates its weight itself."""

    def __init__(self, input_size, output_size, *, gather_output, skip_weight_param_allocation=False, **rest):
        assert not gather_output and not skip_weight_param_allocation
        assert rest["tp_comm_buffer_name"] in ("qkv", "fc1") and not rest["is_expert"]
        super().__init__(input_size, output_size, **rest)
        BUILT.append(rest["tp_comm_buffer_name"])


class Row(RowParallelLinear):
    """Transformer Engine's takes a split input only."""

    def __init__(self, input_size, output_size, *, input_is_parallel, **rest):
        assert input_is_parallel and rest["tp_comm_buffer_name"] in ("proj", "fc2")
        super().__init__(input_size, output_size, input_is_parallel=True, **rest)
        BUILT.append(rest["tp_comm_buffer_name"])


class Norm:
    """As megatron-core's wrapper, a call that makes another module, with the width and eps alone to go by."""

    def __new__(cls, config, hidden_size, eps=1e-5):
        assert config.normalization == "RMSNorm"
        BUILT.append("norm")
        return torch.nn.RMSNorm(hidden_size, eps=eps)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_the_same_weights_give_the_same_scores_with_the_layers_of_transformer_engine(family, tmp_path, monkeypatch):
    folder = str(tiny_model(tmp_path / "model", family))
    monkeypatch.setattr(transformer_engine, "TEColumnParallelLinear", Column)
    monkeypatch.setattr(transformer_engine, "TERowParallelLinear", Row)
    monkeypatch.setattr(transformer_engine, "TENorm", Norm)
    monkeypatch.setattr(model, "check_transformer_engine", lambda config: None)
    BUILT.clear()
    layout = init_parallel(ActorConfig())
    samples = random_samples(6, seed=3)
    scores, names = [], []
    for layers in ("torch", "transformer_engine"):
        actor = MegatronActor(folder, ActorConfig(layers=layers), OptimizerConfig(), layout, 1.0, 10)
        scores.append(torch.cat([s.old_log_probs for s in actor.score(samples)]))
        names.append([name for name, _ in actor.model.named_parameters()])
        assert bool(BUILT) == (layers == "transformer_engine")
    shutdown()
    norms = {"qwen2": 2, "qwen3": 4}[family]
    assert sorted(BUILT) == sorted(["qkv", "proj", "fc1", "fc2", *["norm"] * norms] * 2 + ["norm"])  # 2 layers
    assert names[0] == names[1]  # checkpoints and weight syncs know the parameters by them
    assert torch.equal(scores[0], scores[1])
