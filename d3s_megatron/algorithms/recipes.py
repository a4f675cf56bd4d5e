"""Every algorithm as a composition of the same parts; two neighbours differ in one word.

A recipe is a list of credit steps (Experience -> Experience), a token selection, a ratio and a schedule. A new
method adds a row here and a part in its own file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from d3s_megatron.algorithms.advantages import GroupAdvantages
from d3s_megatron.algorithms.config import AlgorithmConfig
from d3s_megatron.algorithms.policy_loss import PolicyLoss
from d3s_megatron.algorithms.sample_selection import DropZero, MaxVariance, RandomSamples
from d3s_megatron.algorithms.schedules import NO_STATE, Amounts, Schedule, State, amounts_at, make_schedule
from d3s_megatron.algorithms.token_selection import AllTokens, TopShare
from d3s_megatron.types import Experience


class CreditStep(Protocol):
    """One step of a recipe; `needs` and `gives` name what must have run before and what is there after.

    `uses_budget` is True for a step that keeps N rollouts per prompt.
    """

    @property
    def needs(self) -> frozenset[str]: ...

    @property
    def gives(self) -> str: ...

    @property
    def uses_budget(self) -> bool: ...

    def __call__(self, experience: Experience, num_kept: int) -> Experience: ...


Build = Callable[[AlgorithmConfig], tuple[CreditStep, ...]]
Ratio = Literal["token", "sequence"]


@dataclass(frozen=True)
class Recipe:
    """A named composition; ValueError where its credit steps stand in an order that makes no sense."""

    name: str
    credit: tuple[CreditStep, ...]
    tokens: AllTokens | TopShare
    ratio: Ratio
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

    @property
    def uses_budget(self) -> bool:
        """True where a step keeps N rollouts per prompt."""
        return any(step.uses_budget for step in self.credit)

    def advantages_of_all(self, experience: Experience) -> Tensor:
        """[N] float64, the advantages of a batch of which nothing is dropped, for comparison."""
        for step in self.credit:
            if step.gives == "advantages":
                experience = step(experience, 0)
        return experience.advantages

    def apply(self, experience: Experience, num_kept: int) -> Experience:
        """Runs the credit steps in order."""
        for step in self.credit:
            experience = step(experience, num_kept)
        return experience


def _advantages(config: AlgorithmConfig) -> GroupAdvantages:
    return GroupAdvantages(config.normalize_std)


def _plain(config: AlgorithmConfig) -> tuple[CreditStep, ...]:
    return (_advantages(config),)


def _pods(config: AlgorithmConfig) -> tuple[CreditStep, ...]:
    return (MaxVariance("reward", "group"), _advantages(config))


def _per_group(config: AlgorithmConfig) -> tuple[CreditStep, ...]:
    return (_advantages(config), MaxVariance("advantage", "group"))


def _whole_batch(config: AlgorithmConfig) -> tuple[CreditStep, ...]:
    return (_advantages(config), MaxVariance("advantage", "batch"))


def _by_chance(config: AlgorithmConfig) -> tuple[CreditStep, ...]:
    return (_advantages(config), RandomSamples())


BY_ENTROPY = TopShare("entropy", fixed_share=0.2)  # the 80/20 paper's share
BY_CHANCE = TopShare("chance")

#                 credit        tokens       ratio       schedule
RECIPES: dict[str, tuple[Build, AllTokens | TopShare, Ratio, str]] = {
    "grpo":  (_plain,       AllTokens(), "token",    "constant"),
    "gspo":  (_plain,       AllTokens(), "sequence", "constant"),
    "pods":  (_pods,        AllTokens(), "token",    "constant"),
    "d1s":   (_per_group,   AllTokens(), "token",    "constant"),
    "d1s-c": (_whole_batch, AllTokens(), "token",    "constant"),
    "d2s":   (_whole_batch, TopShare(),  "token",    "constant"),
    "d3s":   (_whole_batch, TopShare(),  "token",    "linear"),
    "d3s-i": (_per_group,   TopShare(),  "token",    "linear"),
    "random":       (_by_chance, BY_CHANCE,  "token", "linear"),
    "entropy_8020": (_plain,     BY_ENTROPY, "token", "constant"),
}  # fmt: skip

# (clip_low, clip_high, kl_beta): GRPO's usual setting, and the GSPO paper's.
RATIO_DEFAULTS = {"token": (0.2, 0.2, 1e-3), "sequence": (3e-4, 4e-4, 0.0)}


def make_recipe(config: AlgorithmConfig) -> Recipe:
    """The recipe of `config.name`; ValueError with the known names for any other."""
    ratio_name, plus, selection = config.name.rpartition("+")
    if selection not in RECIPES or ratio_name not in (("gspo", "grpo") if plus else ("",)):
        raise ValueError(
            f"algorithm.name is {config.name!r}: use one of {', '.join(RECIPES)}, or gspo+NAME for the sequence ratio"
        )
    build, tokens, ratio, schedule = RECIPES[selection]
    if ratio_name:
        ratio = RECIPES[ratio_name][2]
    credit = build(config) + ((DropZero(),) if config.drop_zero else ())
    recipe = Recipe(config.name, credit, tokens, ratio, config.schedule or schedule)
    if recipe.uses_budget:
        _check_budget(config, recipe.schedule)
    return recipe


def _check_budget(config: AlgorithmConfig, schedule: str) -> None:
    """Only the values that the recipe reads: plain GRPO has no N, a constant schedule no last one."""
    group = config.samples_per_prompt
    for name in ("init",) if schedule == "constant" else ("init", "final"):
        kept = getattr(config, f"kept_per_prompt_{name}")
        if not 2 <= kept <= group:
            raise ValueError(
                f"algorithm.kept_per_prompt_{name} is {kept}: give 2 to samples_per_prompt ({group}), "
                "as a variance needs 2 values and no more than a group can be kept"
            )


def make_loss(config: AlgorithmConfig) -> PolicyLoss:
    """The loss of `config.name` with its ratio's defaults where the config leaves a value unset."""
    ratio = make_recipe(config).ratio
    given = (config.clip_low, config.clip_high, config.kl_beta)
    low, high, beta = (d if v is None else v for v, d in zip(given, RATIO_DEFAULTS[ratio], strict=True))
    return PolicyLoss(ratio, low, high, config.dual_clip, beta, config.kl_kind)


def schedule_of(config: AlgorithmConfig) -> Schedule:
    """The schedule of `config.name`, or the one that the config gives it."""
    return make_schedule(make_recipe(config).schedule, config.schedule_stages, config.schedule_window)


def amounts(config: AlgorithmConfig, step: int, num_steps: int, state: State = NO_STATE) -> Amounts:
    """N and rho of one step: all G rollouts and a share of 1 where the recipe does not choose.

    `state` is the schedule's, after the step before.
    """
    recipe, everything = make_recipe(config), config.samples_per_prompt
    fixed = recipe.tokens.fixed_share
    return amounts_at(
        schedule_of(config),
        step,
        num_steps,
        (config.kept_per_prompt_init, config.kept_per_prompt_final) if recipe.uses_budget else (everything, everything),
        (config.token_share_init, config.token_share_final) if fixed is None else (fixed, fixed),
        state,
    )
