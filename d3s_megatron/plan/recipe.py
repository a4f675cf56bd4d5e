"""The planner's questions, answered by a run's configuration file instead of flags."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from d3s_megatron.actor.config import ActorConfig
from d3s_megatron.algorithms.config import AlgorithmConfig
from d3s_megatron.algorithms.recipes import make_loss, make_recipe
from d3s_megatron.config import TrainConfig
from d3s_megatron.data.config import DataConfig
from d3s_megatron.plan.cost import Work
from d3s_megatron.plan.memory import Layout
from d3s_megatron.plan.search import Rollouts
from d3s_megatron.rollout.config import RolloutConfig


@dataclass(frozen=True)
class Asked:
    """What a configuration asks of a machine."""

    layout: Layout
    work: Work
    rollouts: Rollouts
    with_reference: bool


def asked_by(path: Path, gpus: int, prompt_tokens: int, answer_tokens: int) -> Asked:
    """What the run of a YAML file takes on `gpus` ranks.

    Args:
        prompt_tokens, answer_tokens: means, which no configuration knows; longest ones are the file's.

    Raises:
        ValueError: where the file's layout does not divide the ranks, or has uneven stages.
    """
    given: dict[str, dict[str, Any]] = yaml.safe_load(path.read_text()) or {}
    actor = ActorConfig(**given.get("actor", {}))
    rollout = RolloutConfig(**given.get("rollout", {}))
    algorithm = AlgorithmConfig(**given.get("algorithm", {}))
    data, train = DataConfig(**given.get("data", {})), TrainConfig(**given.get("train", {}))
    tp, pp, cp = actor.tensor_model_parallel_size, actor.pipeline_model_parallel_size, actor.context_parallel_size
    if gpus % (tp * pp * cp):
        cut = f"TP {tp} x PP {pp}" + (f" x CP {cp}" if cp > 1 else "")
        raise ValueError(f"gpus is {gpus}: {path} has {cut}, give a multiple of {tp * pp * cp}")
    if actor.num_layers_in_first_pipeline_stage or actor.num_layers_in_last_pipeline_stage:
        raise ValueError(f"{path} has uneven pipeline stages, which are not planned: leave num_layers_in_... out")
    longest = data.max_prompt_tokens + rollout.max_new_tokens
    layout = Layout(
        tp=tp,
        pp=pp,
        vpp=actor.virtual_pipeline_model_parallel_size,
        dp=gpus // (tp * pp * cp),
        cp=cp,
        sequence_parallel=actor.sequence_parallel,
        distributed_optimizer=actor.use_distributed_optimizer,
        recompute=actor.recompute,
        weight_bytes=2 if actor.dtype == "bfloat16" else 4,
        tokens=max(actor.max_tokens_per_microbatch, longest),  # a longer rollout gets a micro-batch of its own
        max_logits_bytes=actor.max_logits_mb * 2**20,
        vocab_multiple=actor.vocab_padding_multiple,
    )
    work = Work(
        prompts=train.prompts_per_step,
        samples=algorithm.samples_per_prompt,
        prompt_tokens=prompt_tokens,
        answer_tokens=answer_tokens,
        max_tokens=longest,
        kept_share=kept_share(algorithm),
        answers_at_once=rollout.max_batch_size,
    )
    rollouts = Rollouts(
        tp=rollout.vllm_tensor_parallel if rollout.engine == "vllm" else 1,
        sleeps=rollout.engine == "vllm" and rollout.vllm_sleep,
        apart=rollout.engine == "server",
        memory_share=rollout.vllm_memory_share if rollout.engine == "vllm" else None,
        state_to_host=actor.offload_between_phases,
    )
    return Asked(layout, work, rollouts, make_loss(algorithm).kl_beta > 0)


def kept_share(algorithm: AlgorithmConfig) -> float:
    """Share of the rollouts that is trained on, as a mean over a run; a schedule counts by its two ends."""
    recipe = make_recipe(algorithm)
    if not recipe.uses_budget:
        return 1.0
    first = algorithm.kept_per_prompt_init
    last = first if recipe.schedule == "constant" else algorithm.kept_per_prompt_final
    return (first + last) / 2 / algorithm.samples_per_prompt
