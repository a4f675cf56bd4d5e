"""Seconds of one training step, with selection and without: a model from counted work and assumed rates.

What is counted: FLOPs of matrix products and attention, bytes of weights and cache that decoding reads, bytes that
are sent. What is assumed, and said beside the result: the rates in `Machine`. Left out: prefill of prompts, rewards,
start-up of kernels, and answers of unequal length waiting for the longest one.
"""

from __future__ import annotations

from dataclasses import dataclass

from d3s_megatron.convert import ModelShape
from d3s_megatron.plan.memory import Layout, kv_bytes_per_token, model_parameters


@dataclass(frozen=True)
class Machine:
    """One GPU and its links; the defaults are an H100 SXM with 400 Gbit/s a GPU."""

    memory_gb: float = 80.0
    tflops: float = 989.0  # dense bfloat16
    bandwidth_tb: float = 3.35  # memory, TB/s
    network_gb: float = 50.0  # between nodes, GB/s a GPU
    utilisation: float = 0.4  # of the FLOPs in training
    decode_utilisation: float = 0.5  # of the memory bandwidth in decoding


@dataclass(frozen=True)
class Work:
    """One step of the algorithm; the shares are means over a run."""

    prompts: int = 128
    samples: int = 16
    prompt_tokens: int = 256
    answer_tokens: int = 1024
    max_tokens: int = 4096  # prompt and answer
    kept_share: float = 0.6  # of the rollouts: D3S' schedule from 25% to 100%, roughly
    answers_at_once: int = 256  # decoded together by one engine

    @property
    def rollouts(self) -> int:
        return self.prompts * self.samples


@dataclass(frozen=True)
class Times:
    """Seconds of one step."""

    rollout: float
    score: float
    update: float
    sync: float

    @property
    def total(self) -> float:
        return sum(vars(self).values())


def forward_flops(shape: ModelShape, length: int) -> float:
    """FLOPs of one token's forward pass in a sample of that length: products and causal attention."""
    embedding = shape.vocab_size * shape.hidden_size
    products = model_parameters(shape) - (0 if shape.tied else embedding)
    attention = 2 * shape.num_layers * shape.num_heads * shape.head_dim * length  # 4 h d L, over half the square
    return 2.0 * products + attention


def num_microbatches(layout: Layout, work: Work, kept_share: float) -> int:
    """Micro-batches of one replica in one update."""
    tokens = work.rollouts * kept_share * (work.prompt_tokens + work.answer_tokens)
    return max(1, round(tokens / layout.dp / layout.tokens))


def step_times(
    shape: ModelShape, layout: Layout, work: Work, machine: Machine, engine_tp: int, kept_share: float
) -> Times:
    """Times of a step that scores and updates on `kept_share` of its rollouts (1: no selection of rollouts)."""
    length = work.prompt_tokens + work.answer_tokens
    rate = layout.gpus * machine.tflops * 1e12 * machine.utilisation
    micro = num_microbatches(layout, work, kept_share)
    bubble = 1 + (layout.pp - 1) / (micro * layout.vpp)
    forward = work.rollouts * kept_share * length * forward_flops(shape, length) / rate * bubble
    backward = 2.0 + (1.0 if layout.recompute == "full" else 0.0)
    return Times(
        rollout=_rollout_seconds(shape, layout, work, machine, engine_tp),
        score=forward,
        update=forward * (1 + backward),
        sync=2 * model_parameters(shape) / (machine.network_gb * 1e9),
    )


def _rollout_seconds(shape: ModelShape, layout: Layout, work: Work, machine: Machine, engine_tp: int) -> float:
    engines = max(1, layout.gpus // engine_tp)
    answers = work.rollouts / engines
    together = min(answers, work.answers_at_once)
    cache = together * (work.prompt_tokens + work.answer_tokens / 2) * kv_bytes_per_token(shape)
    read = (2 * model_parameters(shape) + cache) / (engine_tp * machine.bandwidth_tb * 1e12)
    flops = together * forward_flops(shape, work.prompt_tokens + work.answer_tokens // 2)
    compute = flops / (engine_tp * machine.tflops * 1e12)
    one_token = max(read / machine.decode_utilisation, compute / machine.utilisation)
    return one_token * work.answer_tokens * answers / together
