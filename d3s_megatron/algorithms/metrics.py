"""What selection did to a batch, in numbers that are logged at every step."""

from __future__ import annotations

import math

from torch import Tensor

from d3s_megatron.algorithms.groups import number_groups
from d3s_megatron.types import Experience


def _variance(values: Tensor) -> float:
    return float(values.var()) if len(values) > 1 else 0.0  # ddof 1, as the method's


def useful_groups(experience: Experience) -> tuple[int, int]:
    """(groups with rewards that differ, groups) among the groups that the kept rollouts come from."""
    group, num = number_groups(experience.group_ids)
    valid = experience.rewards.isfinite()
    rewards = experience.rewards[valid]
    low = rewards.new_full((num,), math.inf).scatter_reduce_(0, group[valid], rewards, "amin")
    high = rewards.new_full((num,), -math.inf).scatter_reduce_(0, group[valid], rewards, "amax")
    present = experience.kept.new_zeros(num).index_fill_(0, group[experience.kept], True)
    return int((present & (high > low)).sum()), int(present.sum())


def selection_metrics(before: Experience, after: Experience, all_advantages: Tensor | None = None) -> dict[str, float]:
    """Metrics of one selection.

    Args:
        before: the batch with all rollouts that have a verdict kept.
        after: the same batch after the recipe.
        all_advantages: [N], those of `before` (Recipe.advantages_of_all); unset takes `after.advantages`, which is the
            same unless the recipe selects before it normalises and so gives dropped rollouts none (PODS).

    reward, reward_std: mean and sample std over all rollouts with a verdict, not within groups.
    num_rollouts, num_without_verdict, num_kept: counts; kept_share: num_kept / num_rollouts.
    sur: share of the groups in the training set whose rewards differ (method 3.4; 4, row 26); sur_all: the same of all
    groups with a verdict, which is what plain GRPO trains on.
    nonzero_advantage_share: share of the kept rollouts whose advantage is not 0.
    advantage_variance_all, advantage_variance_kept: sample variance around the pool's own mean, of all rollouts with a
    verdict and of the kept ones; 0 for fewer than two.
    effective_samples: (sum abs(A))^2 / sum A^2 over the kept rollouts, from 1 to num_kept: how many share the signal; 0
    where there is none.
    sign_balance: (positive - negative) / (positive + negative) advantages kept, from -1 to 1; 0 is even, or none.
    response_length, response_length_kept: mean response tokens of all rollouts, and of the kept ones.
    """
    valid = before.kept
    rewards = before.rewards[valid]
    kept = after.advantages[after.kept]
    before_advantages = after.advantages if all_advantages is None else all_advantages
    useful_all, num_all = useful_groups(before)
    useful, num_groups = useful_groups(after)
    positive, negative = int((kept > 0).sum()), int((kept < 0).sum())
    square = float((kept**2).sum())
    return {
        "reward": float(rewards.mean()) if len(rewards) else float("nan"),
        "reward_std": _variance(rewards) ** 0.5,
        "num_rollouts": len(valid),
        "num_without_verdict": int((~valid).sum()),
        "num_kept": int(after.kept.sum()),
        "kept_share": float(after.kept.sum()) / max(1, len(valid)),
        "sur_all": useful_all / max(1, num_all),
        "sur": useful / max(1, num_groups),
        "nonzero_advantage_share": float((kept != 0).double().mean()) if len(kept) else 0.0,
        "advantage_variance_all": _variance(before_advantages[valid]),
        "advantage_variance_kept": _variance(kept),
        "effective_samples": float(kept.abs().sum()) ** 2 / square if square else 0.0,
        "sign_balance": (positive - negative) / max(1, positive + negative),
        "truncated_share": float(before.truncated.double().mean()),
        "response_length": float(before.lengths.double().mean()),
        "response_length_kept": float(after.lengths[after.kept].double().mean()) if len(kept) else 0.0,
    }
