"""How answers are sampled, and by which engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from d3s_megatron.rollout.engine import Sampling


@dataclass(frozen=True)
class RolloutConfig:
    """The rollout engine and its sampling; the defaults sample from the policy itself, as the method assumes."""

    engine: Literal["transformers", "vllm"] = "transformers"
    """Engine that answers; "transformers" is built in and runs anywhere."""

    temperature: float = 1.0
    """Sampling temperature; the trainer divides its logits by the same number."""

    top_p: float = 1.0
    """Sample from the smallest set of tokens with this probability; 1 is off, which is what the trainer assumes."""

    top_k: int = 0
    """Sample from this many most likely tokens; 0 is off, which is what the trainer assumes."""

    max_new_tokens: int = 1024
    """Longest answer in tokens, end-of-sequence included."""

    vllm_memory_share: float = 0.4
    """Share of the device's memory that a vLLM engine takes for weights and cache, beside the trainer."""

    max_batch_size: int = 512
    """Answers decoded at once on one rank; lower it where memory is short."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the engine's weights and cache."""

    def __post_init__(self) -> None:
        if self.engine not in ("transformers", "vllm"):
            raise ValueError(f"rollout.engine is {self.engine!r}: use 'transformers' or 'vllm'")
        if not self.temperature > 0:
            raise ValueError(
                f"rollout.temperature is {self.temperature}: training samples at a temperature above 0 "
                "(greedy answers have no spread to learn from)"
            )
        if self.max_batch_size < 1:
            raise ValueError(f"rollout.max_batch_size is {self.max_batch_size}: it must be at least 1")
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"rollout.dtype is {self.dtype!r}: use float32, bfloat16 or float16")
        self.sampling()  # checks the rest

    def sampling(self) -> Sampling:
        """The part an engine is given with every call."""
        return Sampling(self.temperature, self.max_new_tokens, self.top_p, self.top_k)
