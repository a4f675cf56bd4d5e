"""What a user may say about the Megatron actor and its optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ActorConfig:
    """The Megatron actor: layout, precision and memory limits."""

    tensor_model_parallel_size: int = 1
    """Ranks that share every layer's matrices (TP)."""
    pipeline_model_parallel_size: int = 1
    """Pipeline stages (PP); the number of layers must be divisible by it."""
    sequence_parallel: bool = False
    """Split activations between the matrices over the TP ranks too; needs TP of at least 2."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights in the forward pass; gradients and main weights are float32 always."""
    use_distributed_optimizer: bool = False
    """Split the optimizer state over the data-parallel ranks."""
    max_tokens_per_microbatch: int = 16384
    """Packed tokens of one micro-batch; a longer rollout gets a micro-batch of its own."""
    max_logits_mb: int = 512
    """Memory for logits in the scoring pass, per rank, in MiB; the output layer runs in row chunks below it."""
    vocab_padding_multiple: int = 128
    """The vocabulary of each TP rank is padded to a multiple of it; padded columns never take part."""
    timeout_minutes: float = 10.0
    """A collective that waits longer than this ends the job."""

    def __post_init__(self) -> None:
        for name in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "max_tokens_per_microbatch",
            "max_logits_mb",
            "vocab_padding_multiple",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"actor.{name} is {getattr(self, name)}: give a whole number of at least 1")
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ValueError(
                "actor.sequence_parallel is true with actor.tensor_model_parallel_size 1: "
                "switch it off, or give 2 or more tensor-parallel ranks"
            )


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its learning-rate schedule."""

    lr: float = 1e-6
    """Largest learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of a decaying schedule."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate goes from lr to min_lr over the run."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up from 0."""
    weight_decay: float = 0.1
    """Decoupled weight decay; biases and norms have none."""
    beta1: float = 0.9
    """Decay of AdamW's first moment."""
    beta2: float = 0.999
    """Decay of AdamW's second moment."""
    eps: float = 1e-8
    """AdamW's denominator term."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 switches clipping off."""

    def __post_init__(self) -> None:
        if self.lr < 0 or self.min_lr < 0 or self.min_lr > self.lr:
            raise ValueError(f"optimizer.lr {self.lr} and min_lr {self.min_lr}: need 0 <= min_lr <= lr")
        if self.warmup_steps < 0 or self.clip_grad < 0 or self.weight_decay < 0:
            raise ValueError("optimizer.warmup_steps, clip_grad and weight_decay must not be negative")
