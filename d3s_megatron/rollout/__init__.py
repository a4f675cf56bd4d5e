"""Where answers come from: a contract, and one file per engine (imported only by who runs that engine)."""

from d3s_megatron.rollout.config import RolloutConfig
from d3s_megatron.rollout.engine import Answers, RolloutEngine, Sampling
from d3s_megatron.rollout.requests import make_requests

__all__ = ["Answers", "RolloutConfig", "RolloutEngine", "Sampling", "make_requests"]
