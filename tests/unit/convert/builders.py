"""Tiny models of every family, as config dicts, state dicts of small whole numbers, and folders."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from d3s_megatron.convert.names import expected_hf_names, hf_shape
from d3s_megatron.convert.shape import ModelShape

ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# (family, changes of its tiny config): every kind of tensor set and of rope that is supported
VARIANTS: list[tuple[str, dict]] = [(family, {}) for family in ARCHITECTURES] + [
    ("qwen2", {"tie_word_embeddings": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("llama", {"head_dim": 8}),
    ("llama", {"rope_theta": 5e5, "rope_scaling": LLAMA3, "max_position_embeddings": 131072}),
]


def tiny_config(family: str = "qwen2", **changes) -> dict:
    """config.json of a model with 4 heads, 2 KV heads, 2 layers and 11 tokens, unless changed."""
    base = {
        "model_type": family,
        "architectures": [ARCHITECTURES[family]],
        "hidden_size": 16,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 11,
        "tie_word_embeddings": False,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "sliding_window": None,
        "torch_dtype": "float32",
    }
    if family == "qwen3":
        base["head_dim"] = 8
    return {**base, **copy.deepcopy(changes)}  # transformers changes nested dicts it is given


def counting_state(shape: ModelShape, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """A state dict in which every element of every tensor is another whole number (modulo what bf16 can hold)."""
    state, at = {}, 0
    for name in expected_hf_names(shape):
        size = hf_shape(shape, name)
        count = torch.Size(size).numel()
        numbers = torch.arange(at, at + count)
        state[name] = (numbers % 251 if dtype == torch.bfloat16 else numbers).to(dtype).view(size)
        at += count
    return state


def write_folder(folder: Path, config: dict, state: dict[str, Tensor]) -> Path:
    """A Hugging Face folder with one safetensors file and a tokenizer file beside it."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
