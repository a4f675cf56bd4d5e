"""Everything a conversion and a model builder need to know, from config.json alone.

Left out: mixture-of-experts, sliding windows, other rope types and quantised weights; each is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from d3s_megatron.convert.families import family_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# transformers' value where config.json names no base (the first Llama 2 folders do not)
DEFAULT_ROPE_THETA = 10_000.0
LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True)
class Llama3Scaling:
    """The four numbers of the "llama3" rope type (Llama 3.1 and 3.2)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class ModelShape:
    """One decoder-only model: RMSNorm, SwiGLU, grouped-query attention, rotary positions.

    Example: Qwen2.5-Math-1.5B is ModelShape("qwen2", num_layers=28, hidden_size=1536, ffn_size=8960, num_heads=12,
    num_kv_heads=2, head_dim=128, vocab_size=151936, tied=True, qkv_bias=True, ...).
    """

    family: str  # model_type of config.json: qwen2, qwen3, llama, mistral
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int  # rows of the embedding in the Hugging Face folder, before Megatron's padding
    tied: bool  # the output head is the embedding
    qkv_bias: bool
    linear_bias: bool  # bias of o_proj and the MLP: Megatron has one switch for both
    qk_norm: bool
    norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    max_positions: int
    dtype: torch.dtype


def read_shape(source: str | Path | Mapping[str, Any]) -> ModelShape:
    """ModelShape of a Hugging Face folder, or of its config.json as a mapping.

    Raises ValueError, naming key, value and remedy, for whatever this package would convert wrongly.
    """
    config = source if isinstance(source, Mapping) else read_config(source)
    family = family_of(config)
    config = {**family.defaults, **config}
    biases = family.biases(config)
    if biases.o_proj != biases.mlp:
        raise ValueError(
            f"bias of o_proj is {biases.o_proj} and of the MLP {biases.mlp}: Megatron has one switch (add_bias_linear) "
            "for both; use a checkpoint where attention_bias and mlp_bias agree"
        )
    _refuse_unsupported(config)
    max_positions = _positive(config, "max_position_embeddings")
    _refuse_window(config, family.window(config), max_positions)
    theta, scaling = _rope(config)
    num_heads = _positive(config, "num_attention_heads")
    num_kv_heads = _positive(config, "num_key_value_heads", num_heads)
    hidden_size = _positive(config, "hidden_size")
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}: "
            "correct config.json"
        )
    if config.get("head_dim") is None and hidden_size % num_heads:
        raise ValueError(f"hidden_size {hidden_size} is no multiple of {num_heads} heads: set head_dim in config.json")
    return ModelShape(
        family=family.model_type,
        num_layers=_positive(config, "num_hidden_layers"),
        hidden_size=hidden_size,
        ffn_size=_positive(config, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_positive(config, "head_dim", hidden_size // num_heads),
        vocab_size=_positive(config, "vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=biases.qkv,
        linear_bias=biases.mlp,
        qk_norm=family.qk_norm,
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        max_positions=max_positions,
        dtype=_dtype(config),
    )


def read_config(folder: str | Path) -> dict[str, Any]:
    """config.json of a Hugging Face folder as a dict; ValueError where it is missing or no JSON object."""
    path = Path(folder) / "config.json"
    if not Path(folder).is_dir():
        raise ValueError(f"no folder {folder}")
    if not path.is_file():
        raise ValueError(f"no config.json in {folder}: give a Hugging Face model folder")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON ({error}): copy it again from the source") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds {type(config).__name__}, expected a JSON object")
    return config


def _positive(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key} is {value!r} in config.json: expected a positive whole number")
    return value


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"hidden_act is {activation!r}: only 'silu' (SwiGLU) is supported")
    if config.get("quantization_config"):
        raise ValueError("quantization_config is set: save a dequantised copy (bfloat16 or float32) and convert that")
    if config.get("use_mrope"):
        raise ValueError("use_mrope is true: multimodal rope is not supported, only text models are")


def _refuse_window(config: Mapping[str, Any], window: int | None, max_positions: int) -> None:
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    if window is not None and window < max_positions:
        raise ValueError(
            f"sliding_window is {window}, in use, and shorter than max_position_embeddings {max_positions}: sliding "
            f"windows are not supported; set sliding_window to null and max_position_embeddings to {window} in a copy"
        )
    if kinds and window is None:
        raise ValueError(f"layer_types has {sorted(kinds)}: only 'full_attention' layers are supported")


def _rope(config: Mapping[str, Any]) -> tuple[float, Llama3Scaling | None]:
    """Base and scaling, from the top level, `rope_scaling` (transformers 4) or `rope_parameters` (transformers 5)."""
    top = config.get("rope_theta")
    new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if new and old and any(new.get(key) != value for key, value in old.items() if key in LLAMA3_KEYS):
        raise ValueError(f"rope_parameters {new} and rope_scaling {old} disagree in config.json: keep the right one")
    given = {**old, **new}
    if any(isinstance(value, Mapping) for value in given.values()):
        raise ValueError(f"rope_parameters differ by layer type ({given}): one rope for all layers is supported")
    inner = given.get("rope_theta")
    if top is not None and inner is not None and float(top) != float(inner):
        raise ValueError(f"rope_theta is {top} and {inner} in config.json: keep the right one")
    theta = float(inner if inner is not None else top if top is not None else DEFAULT_ROPE_THETA)
    for partial in (config.get("partial_rotary_factor"), given.get("partial_rotary_factor")):
        if partial not in (None, 1, 1.0):
            raise ValueError(f"partial_rotary_factor is {partial}: only full rotation (1.0) is supported")
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(
            f"rope type {kind!r} is not supported: 'default' and 'llama3' are; remove the scaling or add it"
        )
    missing = [key for key in LLAMA3_KEYS if given.get(key) is None]
    if missing:
        raise ValueError(f"rope type 'llama3' without {', '.join(missing)}: copy them from the model's own config.json")
    factor, low, high, original = (given[key] for key in LLAMA3_KEYS)
    return theta, Llama3Scaling(float(factor), float(low), float(high), int(original))


def _dtype(config: Mapping[str, Any]) -> torch.dtype:
    name = config.get("dtype", config.get("torch_dtype"))
    if name is None:
        return torch.float32  # transformers' own reading of a config without dtype
    name = str(name).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"dtype is {name!r} in config.json: supported are {', '.join(DTYPES)}")
    return DTYPES[name]
