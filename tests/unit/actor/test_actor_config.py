"""What cannot be is refused in one line, before anything is started."""

import pytest

from d3s_megatron.actor import cpu_device
from d3s_megatron.actor.config import ActorConfig
from d3s_megatron.actor.model import check_shape, fuses_weight_gradients
from d3s_megatron.actor.parallel import check_layout
from d3s_megatron.convert import ModelShape, read_shape

PP = "pipeline_model_parallel_size"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"context_parallel_size": 0}, "at least 1"),
        ({"sequence_parallel": True}, "2 or more tensor-parallel ranks"),
        ({"virtual_pipeline_model_parallel_size": 2}, "2 or more pipeline stages"),
        ({"num_layers_in_last_pipeline_stage": 2}, "2 or more pipeline stages"),
        ({PP: 2, "num_layers_in_first_pipeline_stage": 0}, "at least 1 layer"),
        ({"max_logits_mb": 0}, "at least 1"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        ActorConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"context_parallel_size": 4}, r"context_parallel_size 4 ranks: start a multiple of 4 processes"),
        ({"context_parallel_size": 2, "tensor_model_parallel_size": 2}, "start a multiple of 4 processes"),
        ({PP: 4}, r"pipeline_model_parallel_size 4 ranks: start a multiple of 4"),
    ],
)
def test_six_processes_that_hold_no_whole_replicas_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        check_layout(ActorConfig(**settings), 6)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({PP: 2}, "use a divisor of 7"),
        ({PP: 3, "num_layers_in_first_pipeline_stage": 2}, "5 of the model's 7 layers to 2 stages"),
        ({PP: 2, "num_layers_in_first_pipeline_stage": 7}, "0 of the model's 7 layers"),
        ({PP: 2, "num_layers_in_first_pipeline_stage": 3, "num_layers_in_last_pipeline_stage": 3}, "leave 1 of"),
        ({PP: 7, "virtual_pipeline_model_parallel_size": 2}, "a stage has 1 layers"),
    ],
)
def test_a_model_of_seven_layers_that_does_not_divide_is_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        check_shape(seven_layers(), ActorConfig(**settings))


@pytest.mark.parametrize(
    "settings",
    [
        {PP: 7},
        {PP: 3, "num_layers_in_first_pipeline_stage": 3},
        {PP: 2, "num_layers_in_first_pipeline_stage": 3, "num_layers_in_last_pipeline_stage": 4},
        {PP: 2, "num_layers_in_last_pipeline_stage": 3},
    ],
)
def test_a_model_of_seven_layers_fits_stages_that_add_up(settings):
    check_shape(seven_layers(), ActorConfig(**settings))


def test_gradient_accumulation_fusion_on_a_gpu_is_off_by_itself_without_the_kernel(monkeypatch):
    """Fault F02."""
    assert fuses_weight_gradients(ActorConfig())  # on a CPU by torch
    monkeypatch.setattr(cpu_device, "needed", lambda: False)
    with pytest.warns(UserWarning, match="gradient_accumulation_fusion is off"):
        assert not fuses_weight_gradients(ActorConfig(gradient_accumulation_fusion=True))
    assert not fuses_weight_gradients(ActorConfig())


def seven_layers() -> ModelShape:
    return read_shape(
        {
            "model_type": "llama",
            "num_hidden_layers": 7,
            "hidden_size": 8,
            "intermediate_size": 16,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "vocab_size": 11,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e4,
            "max_position_embeddings": 32,
            "tie_word_embeddings": False,
        }
    )
