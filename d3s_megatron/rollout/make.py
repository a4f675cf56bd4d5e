"""The engine that a configuration names, for training, evaluation and servers alike; only that one is imported."""

from __future__ import annotations

from pathlib import Path

import torch

from d3s_megatron.rollout.config import RolloutConfig
from d3s_megatron.rollout.engine import RolloutEngine


def make_engine(
    model: str | Path, config: RolloutConfig, max_model_len: int, device: str | torch.device, *, colocated: bool = True
) -> RolloutEngine:
    """Loads a model folder into an engine of this process; ValueError where it is not installed.

    Args:
        config: its `engine` is "transformers" or "vllm".
        max_model_len: the longest prompt and answer together, in tokens.
        device: of the transformers engine; vLLM takes the process's own.
        colocated: among the ranks of a process group, which vLLM then joins.
    """
    if config.engine == "vllm":
        from d3s_megatron.rollout.vllm_engine import VllmEngine

        return VllmEngine(model, config, max_model_len, colocated=colocated)
    assert config.engine == "transformers", config.engine
    from d3s_megatron.rollout.transformers_engine import TransformersEngine

    return TransformersEngine(model, config, device)
