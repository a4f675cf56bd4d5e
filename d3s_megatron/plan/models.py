"""Shapes of models that a plan can be made for without having them: what their config.json says, in our words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from d3s_megatron.convert import ModelShape, read_shape

_QWEN2 = {"model_type": "qwen2", "dtype": "bfloat16", "rms_norm_eps": 1e-6, "rope_theta": 1e6}
_LLAMA31 = {
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


def _sizes(layers: int, hidden: int, ffn: int, heads: int, kv_heads: int) -> dict[str, int]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


_MATH = {"max_position_embeddings": 4096, "rope_theta": 1e4}
_LLAMA_8B = _LLAMA31 | _sizes(32, 4096, 14336, 32, 8)
MODELS: dict[str, dict[str, Any]] = {
    "Qwen2.5-Math-1.5B": _QWEN2
    | _MATH
    | _sizes(28, 1536, 8960, 12, 2)
    | {"vocab_size": 151936, "tie_word_embeddings": True},
    "Qwen2.5-Math-7B": _QWEN2 | _MATH | _sizes(28, 3584, 18944, 28, 4) | {"vocab_size": 152064},
    "Qwen2.5-72B": _QWEN2
    | _sizes(80, 8192, 29568, 64, 8)
    | {"vocab_size": 152064, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5},
    "Llama-3.1-8B": _LLAMA_8B,
    "Llama-3.1-8B-Instruct": _LLAMA_8B,
    "OpenMath2-Llama3.1-8B": _LLAMA_8B,
    "Llama-3.1-70B": _LLAMA31 | _sizes(80, 8192, 28672, 64, 8),
}


def shape_of(model: str) -> ModelShape:
    """The shape of a known name, of a folder with config.json, or of such a file; ValueError where it is neither."""
    if model in MODELS:
        return read_shape(MODELS[model])
    path = Path(model)
    path = path.parent if path.is_file() else path
    if not (path / "config.json").is_file():
        raise ValueError(f"model is {model!r}: give a folder with config.json, or one of {', '.join(MODELS)}")
    return read_shape(path)
