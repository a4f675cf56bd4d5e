"""What a user may say about the algorithm; see recipes.py for what each name is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class AlgorithmConfig:
    """The recipe, how much it keeps, and its loss."""

    name: str = "d3s"
    """grpo, gspo, pods, d1s, d1s-c, d2s, d3s, d3s-i, the controls random and entropy_8020, or gspo+NAME for NAME's
    selection with the sequence ratio."""
    samples_per_prompt: int = 32
    """G, rollouts generated for each prompt."""
    kept_per_prompt_init: int = 8
    """N at the first step: rollouts kept per prompt (cross-group selection keeps N x prompts in all)."""
    kept_per_prompt_final: int = 32
    """N at the last step; recipes with a constant schedule use only the first value."""
    token_share_init: float = 0.1
    """rho at the first step: share of the kept rollouts' response tokens that are trained on."""
    token_share_final: float = 0.4
    """rho at the last step; recipes with a constant schedule use only the first value."""
    schedule: Literal["constant", "linear", "cosine", "step", "reward", "entropy"] | None = None
    """How N and rho move from first to last value: over the run's length; or a stair up where the reward rises no
    more, or where entropy is lost; unset takes the recipe's own."""
    schedule_stages: int = 4
    """Stairs of the schedules step, reward and entropy."""
    schedule_window: int = 10
    """Steps over which the schedules reward and entropy look."""
    truncated: Literal["wrong", "exclude", "judge"] = "wrong"
    """Answers cut at rollout.max_new_tokens: reward 0, left out of their group, or judged as they are."""
    drop_zero: bool = False
    """Drop kept rollouts whose advantage is 0, with any recipe, instead of keeping exactly N."""
    normalize_std: bool = True
    """Divide advantages by the group's sample standard deviation; off gives Dr. GRPO's advantages."""
    token_entropy: Literal["old", "current"] = "old"
    """Entropy of the token score: scored once a batch, or again before every optimizer step."""
    loss_normalization: Literal["token_mean", "seq_mean_selected", "seq_mean_full", "dr_grpo"] = "token_mean"
    """How the summed token losses are divided, by global counts; seq_mean_full is that of GRPO's and GSPO's papers."""
    clip_low: float | None = None
    """Lower clip range of the ratio; unset takes 0.2 (token ratio) or 3e-4 (sequence ratio)."""
    clip_high: float | None = None
    """Upper clip range of the ratio; unset takes 0.2 (token ratio) or 4e-4 (sequence ratio)."""
    dual_clip: float | None = None
    """Bound c > 1 of the loss for negative advantages, c x abs(advantage); unset switches it off."""
    kl_beta: float | None = None
    """Weight of the KL to the first weights; unset takes 1e-3 (token ratio) or 0 (sequence ratio)."""
    kl_kind: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL; as a loss only k2 has the KL's own gradient on average, k1's is zero."""
    kl_tokens: Literal["kept", "all"] = "kept"
    """Whether the KL is taken on the kept tokens or on all tokens of the kept rollouts."""
    rollout_correction: Literal["none", "token", "sequence"] | None = None
    """Importance weights for engines that differ from the trainer; unset is none for transformers, else token."""
    rollout_correction_cap: float = 2.0
    """Largest of these weights."""
    num_minibatches: int = 1
    """Optimizer steps per pass over the kept rollouts."""
    num_epochs: int = 1
    """Passes over the kept rollouts of a batch."""

    def __post_init__(self) -> None:
        # N against G is checked in recipes.py, for the recipes that have an N.
        if self.samples_per_prompt < 2:
            raise ValueError(
                f"algorithm.samples_per_prompt is {self.samples_per_prompt}: a group of one has no baseline, "
                "give at least 2"
            )
        for name in ("token_share_init", "token_share_final"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"algorithm.{name} is {getattr(self, name)}: give a share above 0 and at most 1")
        for name in ("clip_low", "clip_high", "kl_beta"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"algorithm.{name} is {value}: it must not be negative")
        if self.clip_low is not None and self.clip_low >= 1:
            raise ValueError(f"algorithm.clip_low is {self.clip_low}: a ratio cannot fall below 0, give less than 1")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"algorithm.dual_clip is {self.dual_clip}: give more than 1, or leave it unset")
        if self.rollout_correction_cap < 1:
            raise ValueError(
                f"algorithm.rollout_correction_cap is {self.rollout_correction_cap}: give at least 1, the weight of "
                "tokens on which engine and trainer agree"
            )
        if self.schedule_stages < 2:
            raise ValueError(
                f"algorithm.schedule_stages is {self.schedule_stages}: give at least 2, a first and a last"
            )
        for name in ("num_minibatches", "num_epochs", "schedule_window"):
            if getattr(self, name) < 1:
                raise ValueError(f"algorithm.{name} is {getattr(self, name)}: give at least 1")
