"""pass@k, maj@k and their intervals, with the same rollout and reward rooms as training.

`evaluate_policy` runs within training; `python -m d3s_megatron.evaluate` runs a model folder on whole sets.
"""

from d3s_megatron.evaluate.estimators import Estimate, maj_at_k, pass_at_first_k, pass_at_k
from d3s_megatron.evaluate.policy import evaluate_policy, rank_share
from d3s_megatron.evaluate.summary import Answer, Evaluation, summarise

__all__ = [
    "Answer",
    "Estimate",
    "Evaluation",
    "evaluate_policy",
    "maj_at_k",
    "pass_at_first_k",
    "pass_at_k",
    "rank_share",
    "summarise",
]
