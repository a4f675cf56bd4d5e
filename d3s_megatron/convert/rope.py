"""Inverse rotary frequencies, the Llama-3 scaling included (fault B08: silently plain rope)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from d3s_megatron.convert.shape import ModelShape


def rope_inv_freq(shape: ModelShape) -> Tensor:
    """Inverse frequencies [head_dim / 2] float32, in radians per position, equal to transformers'.

    Llama-3 scaling (Llama 3.1 model card): frequencies whose wavelength exceeds original / low_freq_factor are divided
    by `factor`, those below original / high_freq_factor stay, and between the two the divisor is blended linearly in
    original / wavelength.
    """
    exponent = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    plain = 1.0 / shape.rope_theta**exponent
    scaling = shape.rope_scaling
    if scaling is None:
        return plain
    turns = scaling.original_max_positions / (2 * math.pi / plain)  # full turns within the original context
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return (1 - keep) * plain / scaling.factor + keep * plain
