"""Truncated importance weights for the gap between the engine that sampled and the trainer that scores.

Both compute pi_old, with other kernels and precisions; pi_trainer / pi_engine, cut at a cap, takes that bias out of the
policy gradient. It multiplies the token's weight in the loss and carries no gradient.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from d3s_megatron.algorithms.policy_loss import MAX_LOG_RATIO

Level = Literal["none", "token", "sequence"]


def correction(old_log_probs: Tensor, rollout_log_probs: Tensor, level: Level, cap: float) -> Tensor:
    """Importance weights [L] in (0, cap] of one sample's response tokens [L].

    "token" weighs each token by its own ratio, "sequence" all of them by the ratio of the whole response.
    """
    log_ratio = (old_log_probs - rollout_log_probs).float()
    if level == "none":
        return torch.ones_like(log_ratio)
    if level == "sequence":
        log_ratio = log_ratio.sum().expand_as(log_ratio)
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=cap)
