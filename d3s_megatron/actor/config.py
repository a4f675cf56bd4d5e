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
    """Pipeline stages (PP); the layers that first and last stage leave over must be divisible by the others."""
    num_layers_in_first_pipeline_stage: int | None = None
    """Layers of the first stage, beside the embedding; unset gives it as many as the others."""
    num_layers_in_last_pipeline_stage: int | None = None
    """Layers of the last stage, beside the output layer; unset gives it as many as the others."""
    virtual_pipeline_model_parallel_size: int = 1
    """Chunks of layers per stage (VPP); 2 or more shorten the pipeline's bubble and need PP of at least 2."""
    context_parallel_size: int = 1
    """Ranks that share every sequence (CP), each with 1/CP of its tokens; for long answers."""
    attention: Literal["torch", "transformer_engine"] = "torch"
    """torch runs anywhere; transformer_engine is its fused THD kernel and needs a GPU and bfloat16."""
    layers: Literal["torch", "transformer_engine"] = "torch"
    """Matrices and norms of the layers: torch's, or Transformer Engine's, which need a GPU."""
    sequence_parallel: bool = False
    """Split activations between the matrices over the TP ranks too; needs TP of at least 2."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights in the forward pass; gradients and main weights are float32 always."""
    use_distributed_optimizer: bool = False
    """Split the optimizer state over the data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Reduce gradients over the data-parallel ranks while the backward pass still runs."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations made again in the backward pass: none, the attention's, or those of whole layers."""
    gradient_accumulation_fusion: bool = False
    """On a GPU add the layers' weight gradients into the float32 buffer inside the GEMM, as a CPU always does; off by
    itself without NVIDIA Apex's kernel."""
    offload_between_phases: bool = False
    """Move optimizer state and gradients to the host while rollouts are made; does nothing without a GPU."""
    select_before_scoring: bool = True
    """Score the kept rollouts only; off scores every rollout and drops the rest afterwards, for comparison."""
    score_in_update: bool = True
    """Take log-probs and entropies from the update's own forward pass where all tokens of the kept rollouts are trained
    in one update, with neither KL nor rollout correction; off always runs a pass before it, for comparison."""
    gather_rows: bool = True
    """Run the output layer on the scored rows only; off computes every row and masks, for comparison."""
    truncate_samples: bool = True
    """End samples after their last kept token in the update; off runs them whole, for comparison."""
    share_prompts: bool = True
    """Run the layers once on a prompt for all of its rollouts in a micro-batch; off runs them with each rollout, as
    transformer_engine attention, context parallelism and gather_rows off always do."""
    max_tokens_per_microbatch: int = 16384
    """Packed tokens of one micro-batch, over all CP ranks; a longer rollout gets a micro-batch of its own."""
    max_logits_mb: int = 512
    """Memory for logits per rank and micro-batch, in MiB: scoring runs the output layer in row chunks below it, and
    an update whose logits would not fit makes them tile by tile, twice."""
    vocab_padding_multiple: int = 128
    """The vocabulary of each TP rank is padded to a multiple of it; padded columns never take part."""
    timeout_minutes: float = 10.0
    """A collective that waits longer than this ends the job."""

    def __post_init__(self) -> None:
        for name in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "virtual_pipeline_model_parallel_size",
            "context_parallel_size",
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
        if self.attention == "transformer_engine" and self.dtype != "bfloat16":
            raise ValueError(
                f"actor.attention is transformer_engine with actor.dtype {self.dtype}: its fused kernels take "
                "bfloat16 only; set actor.dtype bfloat16, or actor.attention torch"
            )
        self._check_pipeline()

    @property
    def shares_prompts(self) -> bool:
        """Whether rollouts of one prompt share its tokens: switched on, attention can read them so, and the output
        layer takes a row once for each of its targets, of which a shared prompt's last row has several."""
        return self.share_prompts and self.attention == "torch" and self.context_parallel_size == 1 and self.gather_rows

    def _check_pipeline(self) -> None:
        uneven = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
        for name in uneven:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"actor.{name} is {value}: a stage needs at least 1 layer")
        if self.pipeline_model_parallel_size > 1:
            return
        for name, default in (("virtual_pipeline_model_parallel_size", 1), *((name, None) for name in uneven)):
            if getattr(self, name) != default:
                raise ValueError(
                    f"actor.{name} is {getattr(self, name)} with actor.pipeline_model_parallel_size 1: "
                    "leave it out, or give 2 or more pipeline stages"
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
