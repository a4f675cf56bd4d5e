"""One model family as a record: what its config.json says about which tensors there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Biases:
    """Which linear layers have a bias."""

    qkv: bool = False
    o_proj: bool = False
    mlp: bool = False


@dataclass(frozen=True)
class Family:
    """One `model_type` of config.json."""

    model_type: str
    architecture: str  # the class transformers loads it with
    biases: Callable[[Config], Biases]
    qk_norm: bool  # RMSNorm over each head's query and key
    window: Callable[[Config], int | None]  # positions an attention layer sees, None for all
    defaults: Config = field(default_factory=dict)  # transformers' values for keys that config.json may leave out


def full_attention(config: Config) -> int | None:
    """Window of a family that has none."""
    return None


def switched_window(config: Config) -> int | None:
    """Window of the Qwen families: `sliding_window` counts only where `use_sliding_window` is true."""
    return config.get("sliding_window") if config.get("use_sliding_window", False) else None
