"""How N and rho move during training (method 1.9): value = (1 - w) x first + w x last.

A schedule says w from the run's progress, or from what the run has logged so far; then it has a state, a few numbers
that a checkpoint keeps, and a resumed run goes on exactly.

    constant   w = 0                                  linear   w = p, the paper's
    cosine     w = (1 - cos(pi p)) / 2                step     w in equal stairs, from 0 in the first to 1 in the last
    reward     a stair up when the mean reward has not risen for a while: what little was kept has taught its part
    entropy    a stair up for every equal part of its first value that the policy's entropy has lost
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Protocol

State = Mapping[str, float]  # plain numbers, so that it can be written as JSON; empty before the first step
NO_STATE: State = MappingProxyType({})


class Schedule(Protocol):
    """Where between first and last value a step stands."""

    def weight(self, progress: float, state: State) -> float:
        """w in [0, 1] of a step at `progress` in [0, 1]."""
        ...

    def after(self, state: State, row: Mapping[str, Any]) -> State:
        """The state after a step that logged `row`."""
        ...


@dataclass(frozen=True)
class ByProgress:
    """w as a function of progress alone, without a state."""

    curve: Callable[[float], float]

    def weight(self, progress: float, state: State) -> float:
        return self.curve(progress)

    def after(self, state: State, row: Mapping[str, Any]) -> State:
        return state


@dataclass(frozen=True)
class Stairs:
    """A number of equal stairs, one after the other in time."""

    stages: int

    def weight(self, progress: float, state: State) -> float:
        return _stair(min(self.stages - 1, math.floor(progress * self.stages + 1e-9)), self.stages)

    def after(self, state: State, row: Mapping[str, Any]) -> State:
        return state


@dataclass(frozen=True)
class Triggered:
    """Stairs that are climbed when the run shows it; never down again, and a run may end before the last one.

    watch: "reward" climbs where the running mean of the reward has not been above its best for `window` steps, and
        then looks for a new best. "entropy" stands on stair k once the running mean of the entropy is below
        (1 - k / stages) of what it was after the first `window` steps.
    window: steps of the running mean (an exponential one with weight 2 / (window + 1)), and of the patience.
    """

    watch: Literal["reward", "entropy"]
    stages: int
    window: int

    START: ClassVar[State] = MappingProxyType({"stage": 0, "mean": math.nan, "mark": math.nan, "steps": 0})

    def weight(self, progress: float, state: State) -> float:
        return _stair(int(state.get("stage", 0)), self.stages)

    def after(self, state: State, row: Mapping[str, Any]) -> State:
        stage, mean, mark, steps = (state.get(name, value) for name, value in self.START.items())
        value = row[self.watch]
        if value is None or not math.isfinite(value):  # a step without a verdict or a kept rollout says nothing
            return state
        share = 2 / (self.window + 1)
        mean = value if mean != mean else (1 - share) * mean + share * value
        steps += 1
        if self.watch == "reward":
            if mark != mark or mean > mark:
                mark, steps = mean, 0
            elif steps >= self.window:
                stage, mark, steps = min(stage + 1, self.stages - 1), mean, 0
        elif steps == self.window:
            mark = mean
        elif steps > self.window and mark > 0:
            lost = math.floor((1 - mean / mark) * self.stages + 1e-9)
            stage = max(stage, min(lost, self.stages - 1))
        return {"stage": stage, "mean": mean, "mark": mark, "steps": steps}


def _stair(stage: int, stages: int) -> float:
    return stage / (stages - 1)


# Those that need no setting; a new one is one more entry.
CURVES: dict[str, Schedule] = {
    "constant": ByProgress(lambda progress: 0.0),
    "linear": ByProgress(lambda progress: progress),
    "cosine": ByProgress(lambda progress: (1 - math.cos(math.pi * progress)) / 2),
}


def make_schedule(name: str, stages: int = 4, window: int = 10) -> Schedule:
    """The schedule of that name; `stages` and `window` are for those that climb stairs."""
    if name == "step":
        return Stairs(stages)
    if name == "reward":
        return Triggered("reward", stages, window)
    if name == "entropy":
        return Triggered("entropy", stages, window)
    return CURVES[name]


@dataclass(frozen=True)
class Amounts:
    """What one step keeps."""

    progress: float
    num_kept: int  # N, per prompt
    token_share: float  # rho


def progress_at(step: int, num_steps: int) -> float:
    """Step 0 gives 0 and the last step exactly 1; a run of one step stays at 0 (method 4, row 15)."""
    return min(1.0, step / (num_steps - 1)) if num_steps > 1 else 0.0


def amounts_at(
    schedule: Schedule,
    step: int,
    num_steps: int,
    num_kept: tuple[int, int],
    token_share: tuple[float, float],
    state: State = NO_STATE,
) -> Amounts:
    """Amounts of `step` (from 0), a function of the step and the schedule's state alone."""
    progress = progress_at(step, num_steps)
    weight = schedule.weight(progress, state)

    def between(first: float, last: float) -> float:
        return (1 - weight) * first + weight * last

    return Amounts(progress, math.floor(between(*num_kept) + 0.5), between(*token_share))
