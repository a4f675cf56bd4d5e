"""How answers are judged: the box is cut out here, the mathematics is compared in killable worker processes.

`make_reward(config)` gives a `Reward`; `grade([(answer text, gold), ...])` gives one `Verdict` each, in order.

The names are loaded on first use, so that a worker process never pays for (or inherits) torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from d3s_megatron.rewards.config import RewardConfig
    from d3s_megatron.rewards.extract import final_answer
    from d3s_megatron.rewards.golds import check_golds
    from d3s_megatron.rewards.reward import STATUSES, Reward, grade_rollouts, make_reward

_HOMES = {
    "RewardConfig": "config",
    "final_answer": "extract",
    "check_golds": "golds",
    "STATUSES": "reward",
    "Reward": "reward",
    "grade_rollouts": "reward",
    "make_reward": "reward",
}

__all__ = ["STATUSES", "Reward", "RewardConfig", "check_golds", "final_answer", "grade_rollouts", "make_reward"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
