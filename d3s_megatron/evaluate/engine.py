"""The rollout engine that a configuration names, for training and evaluation alike."""

from __future__ import annotations

from pathlib import Path

import torch

from d3s_megatron.rollout import RolloutConfig, RolloutEngine


def make_engine(model: str | Path, config: RolloutConfig, max_model_len: int, device: torch.device) -> RolloutEngine:
    """Loads a model folder into the engine of `rollout.engine`; only that one is imported.

    `max_model_len` is the longest prompt and answer together, in tokens. ValueError where the engine is not installed.
    """
    if config.engine == "vllm":
        from d3s_megatron.rollout.vllm_engine import VllmEngine

        return VllmEngine(model, config, max_model_len=max_model_len)
    from d3s_megatron.rollout.transformers_engine import TransformersEngine

    return TransformersEngine(model, config, device)
