"""Inverse frequencies against worked numbers (fault B08) and against transformers."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from d3s_megatron.convert.rope import rope_inv_freq
from d3s_megatron.convert.shape import read_shape

from .builders import LLAMA3, tiny_config


def frequencies(**changes):
    return rope_inv_freq(read_shape(tiny_config("llama", head_dim=128, rope_theta=5e5, **changes)))


def test_llama3_scaling_of_case_b08():
    plain, scaled = frequencies(), frequencies(rope_scaling=LLAMA3)
    assert scaled.shape == (64,) and scaled.dtype == torch.float32
    torch.testing.assert_close(plain[[0, 32, 63]], torch.tensor([1.0, 1.41421e-3, 2.45514e-6]), rtol=1e-5, atol=0)
    torch.testing.assert_close(scaled[[0, 32, 63]], torch.tensor([1.0, 5.24846e-4, 3.06893e-7]), rtol=1e-5, atol=0)
    blended = (scaled != plain) & ((scaled - plain / 8).abs() > 1e-6 * plain)
    assert blended.nonzero().flatten().tolist() == list(range(29, 35))


@pytest.mark.parametrize("scaling", [None, LLAMA3, {**LLAMA3, "factor": 32.0}])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_equal_to_transformers(scaling, head_dim):
    rope = {"rope_theta": 5e5, **(scaling or {"rope_type": "default"})}
    config = LlamaConfig(hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim, rope_parameters=rope)
    theirs = LlamaRotaryEmbedding(config).inv_freq
    ours = rope_inv_freq(read_shape({**config.to_dict(), "architectures": None}))
    torch.testing.assert_close(ours, theirs, rtol=2e-7, atol=0)
