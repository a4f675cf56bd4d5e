"""config.json -> ModelShape, wherever a transformers version keeps a value; everything else is refused by name."""

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from d3s_megatron.convert.shape import Llama3Scaling, read_shape

from .builders import LLAMA3, tiny_config

SCALING = Llama3Scaling(8.0, 1.0, 4.0, 8192)


def test_qwen2_math_shape():
    config = tiny_config(hidden_size=1536, num_attention_heads=12, rope_theta=10000, torch_dtype="bfloat16")
    shape = read_shape(config)
    assert (shape.family, shape.head_dim, shape.num_kv_heads) == ("qwen2", 128, 2)
    assert (shape.qkv_bias, shape.linear_bias, shape.qk_norm, shape.dtype) == (True, False, False, torch.bfloat16)


@pytest.mark.parametrize(
    "where",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {
            "rope_theta": 5e5,
            "rope_scaling": {"type": "llama3", **{k: v for k, v in LLAMA3.items() if k != "rope_type"}},
        },
        {"rope_parameters": {"rope_theta": 5e5, **LLAMA3}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 5e5, **LLAMA3}, "rope_scaling": LLAMA3},
    ],
)
def test_rope_is_read_from_every_place(where):
    shape = read_shape(tiny_config("llama", **where))
    assert (shape.rope_theta, shape.rope_scaling) == (5e5, SCALING)


def test_defaults_are_those_of_transformers():
    config = {k: v for k, v in tiny_config("qwen3").items() if k not in ("head_dim", "tie_word_embeddings")}
    shape = read_shape(config)
    assert (shape.head_dim, shape.tied, shape.rope_theta, shape.rope_scaling) == (128, False, 10000.0, None)


@pytest.mark.parametrize("config_class", [Qwen2Config, Qwen3Config, LlamaConfig, MistralConfig])
@pytest.mark.parametrize("tied", [True, False])
def test_what_transformers_writes_is_read_back(config_class, tied, tmp_path):
    config_class(
        hidden_size=16, num_attention_heads=4, num_key_value_heads=2, sliding_window=None, tie_word_embeddings=tied
    ).save_pretrained(tmp_path)
    shape = read_shape(tmp_path)
    assert (shape.family, shape.tied, shape.num_kv_heads) == (config_class.model_type, tied, 2)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("qwen2", {"model_type": "gpt2"}, "gpt2.*supported are qwen2"),
        ("qwen2", {"architectures": ["Qwen2ForRewardModel"]}, "Qwen2ForRewardModel.*supported"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 32}, "sliding_window is 32.*null"),
        ("mistral", {"sliding_window": 32}, "sliding_window is 32"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "'yarn'.*'llama3'"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2}}, "'linear'"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "low_freq_factor"),
        ("llama", {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "10000.0 and 500000.0"),
        ("llama", {"rope_scaling": LLAMA3, "rope_parameters": {**LLAMA3, "factor": 32.0}}, "disagree"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama", {"attention_bias": True}, "add_bias_linear"),
        ("llama", {"hidden_act": "gelu"}, "gelu"),
        ("llama", {"quantization_config": {"bits": 4}}, "dequantised"),
        ("llama", {"num_hidden_layers": None}, "num_hidden_layers is None"),
        ("llama", {"num_key_value_heads": 3}, "multiple"),
        ("llama", {"torch_dtype": "float8"}, "float8"),
    ],
)
def test_what_would_be_converted_wrongly_is_refused(family, changes, words):
    with pytest.raises(ValueError, match=words):
        read_shape(tiny_config(family, **changes))


def test_unused_window_is_no_window():
    assert read_shape(tiny_config(sliding_window=8, use_sliding_window=False)).max_positions == 64


def test_missing_and_damaged_config(tmp_path):
    with pytest.raises(ValueError, match="no config.json"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        read_shape(tmp_path)
