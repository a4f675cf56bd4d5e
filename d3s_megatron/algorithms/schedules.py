"""How N and rho move during training (method 1.9): value = (1 - w) x first + w x last, w a function of progress."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

# progress in [0, 1] -> w in [0, 1]; a new schedule is one more entry.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 0.0,
    "linear": lambda progress: progress,
}


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
    schedule: str, step: int, num_steps: int, num_kept: tuple[int, int], token_share: tuple[float, float]
) -> Amounts:
    """Amounts of `step` (from 0); a function of the step alone, so a resumed run goes on exactly."""
    progress = progress_at(step, num_steps)
    weight = SCHEDULES[schedule](progress)

    def between(first: float, last: float) -> float:
        return (1 - weight) * first + weight * last

    return Amounts(progress, math.floor(between(*num_kept) + 0.5), between(*token_share))
