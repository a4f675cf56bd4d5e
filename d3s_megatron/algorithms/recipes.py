"""Every algorithm as a composition of the same parts; two neighbours differ in one word.

A recipe is a list of credit steps (Experience -> Experience), a token selection, a ratio and a schedule. A new
method adds a row here and a part in its own file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from d3s_megatron.algorithms.advantages import GroupAdvantages
from d3s_megatron.algorithms.config import AlgorithmConfig
from d3s_megatron.algorithms.policy_loss import PolicyLoss
from d3s_megatron.algorithms.sample_selection import MaxVariance
from d3s_megatron.algorithms.schedules import Amounts, amounts_at
from d3s_megatron.algorithms.token_selection import AllTokens, TopShare
from d3s_megatron.types import Experience


class CreditStep(Protocol):
    """One step of a recipe; `needs` and `gives` name what must have run before and what is there after."""

    gives: str

    @property
    def needs(self) -> frozenset[str]: ...

    def __call__(self, experience: Experience, num_kept: int) -> Experience: ...


@dataclass(frozen=True)
class Recipe:
    """A named composition; ValueError where its credit steps stand in an order that makes no sense."""

    name: str
    credit: tuple[CreditStep, ...]
    tokens: AllTokens | TopShare
    ratio: Literal["token", "sequence"]
    schedule: str

    def __post_init__(self) -> None:
        have = {"rewards"}
        for step in self.credit:
            missing = step.needs - have
            if missing:
                raise ValueError(
                    f"recipe {self.name}: {step} needs {', '.join(sorted(missing))}, which no step before it gives; "
                    "put group_advantages before it"
                )
            if step.gives == "advantages" and "advantages" in have:
                raise ValueError(f"recipe {self.name}: advantages would be normalised twice; drop the second step")
            have.add(step.gives)
        if "advantages" not in have:
            raise ValueError(f"recipe {self.name}: no step gives advantages; add group_advantages")

    def apply(self, experience: Experience, num_kept: int) -> Experience:
        """Runs the credit steps in order."""
        for step in self.credit:
            experience = step(experience, num_kept)
        return experience


Build = Callable[[AlgorithmConfig], tuple[CreditStep, ...]]


def _advantages(config: AlgorithmConfig) -> GroupAdvantages:
    return GroupAdvantages(config.normalize_std)


def _plain(config: AlgorithmConfig) -> tuple[CreditStep, ...]:
    return (_advantages(config),)


def _pods(config: AlgorithmConfig) -> tuple[CreditStep, ...]:
    return (MaxVariance("reward", "group"), _advantages(config))


def _per_group(config: AlgorithmConfig) -> tuple[CreditStep, ...]:
    return (_advantages(config), MaxVariance("advantage", "group", config.drop_zero))


def _whole_batch(config: AlgorithmConfig) -> tuple[CreditStep, ...]:
    return (_advantages(config), MaxVariance("advantage", "batch", config.drop_zero))


#                 credit        tokens       ratio       schedule
RECIPES = {
    "grpo":  (_plain,       AllTokens(), "token",    "constant"),
    "gspo":  (_plain,       AllTokens(), "sequence", "constant"),
    "pods":  (_pods,        AllTokens(), "token",    "constant"),
    "d1s":   (_per_group,   AllTokens(), "token",    "constant"),
    "d1s-c": (_whole_batch, AllTokens(), "token",    "constant"),
    "d2s":   (_whole_batch, TopShare(),  "token",    "constant"),
    "d3s":   (_whole_batch, TopShare(),  "token",    "linear"),
    "d3s-i": (_per_group,   TopShare(),  "token",    "linear"),
}  # fmt: skip

# (clip_low, clip_high, kl_beta): GRPO's usual setting, and the GSPO paper's.
RATIO_DEFAULTS = {"token": (0.2, 0.2, 1e-3), "sequence": (3e-4, 4e-4, 0.0)}


def make_recipe(config: AlgorithmConfig) -> Recipe:
    """The recipe of `config.name`; ValueError with the known names for any other."""
    ratio_name, _, selection = config.name.rpartition("+")
    if selection not in RECIPES or ratio_name not in ("", "gspo", "grpo"):
        raise ValueError(
            f"algorithm.name is {config.name!r}: use one of {', '.join(RECIPES)}, or gspo+NAME for the sequence ratio"
        )
    credit, tokens, ratio, schedule = RECIPES[selection]
    if ratio_name:
        ratio = RECIPES[ratio_name][2]
    return Recipe(config.name, credit(config), tokens, ratio, config.schedule or schedule)


def make_loss(config: AlgorithmConfig) -> PolicyLoss:
    """The loss of `config.name` with its ratio's defaults where the config leaves a value unset."""
    ratio = make_recipe(config).ratio
    given = (config.clip_low, config.clip_high, config.kl_beta)
    low, high, beta = (d if v is None else v for v, d in zip(given, RATIO_DEFAULTS[ratio], strict=True))
    return PolicyLoss(ratio, low, high, config.dual_clip, beta, config.kl_kind)


def amounts(config: AlgorithmConfig, step: int, num_steps: int) -> Amounts:
    """N and rho of one step; recipes that keep everything ignore them."""
    return amounts_at(
        make_recipe(config).schedule,
        step,
        num_steps,
        (config.kept_per_prompt_init, config.kept_per_prompt_final),
        (config.token_share_init, config.token_share_final),
    )
