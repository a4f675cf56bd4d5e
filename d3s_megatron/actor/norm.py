"""RMSNorm for megatron-core's local layer spec; its own wrapper around torch's refuses sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm; under sequence parallelism its gradient is summed over the TP ranks by megatron-core."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_) -> None:
        super().__init__(hidden_size, eps=eps)
        # Each rank sees a part of the positions, so its gradient is a part of the sum.
        weight: Any = self.weight
        weight.sequence_parallel = config.sequence_parallel
