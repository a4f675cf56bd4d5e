"""From logs to numbers: accuracy of each run at a step, at a count of trained tokens or at a time, and over seeds."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from d3s_megatron.report.log_file import LOG_FILE, SUMMARY_FILE, read_log

Axis = Literal["step", "tokens", "seconds"]
AXES: tuple[Axis, ...] = ("step", "tokens", "seconds")
ACCURACY = "eval/pass@1"

# Student's t at 0.975 for 1 to 30 degrees of freedom; beyond, the normal's with its first correction.
T_975 = (
    *(12.706205, 4.302653, 3.182446, 2.776445, 2.570582, 2.446912, 2.364624, 2.306004, 2.262157, 2.228139),
    *(2.200985, 2.178813, 2.160369, 2.144787, 2.131450, 2.119905, 2.109816, 2.100922, 2.093024, 2.085963),
    *(2.079614, 2.073873, 2.068658, 2.063899, 2.059539, 2.055529, 2.051831, 2.048407, 2.045230, 2.042272),
)
Z_975 = 1.959964


def t_quantile(degrees: int) -> float:
    """Student's t at 0.975."""
    return T_975[degrees - 1] if degrees <= len(T_975) else Z_975 + (Z_975**3 + Z_975) / (4 * degrees)


@dataclass(frozen=True)
class Interval:
    """A mean over seeds with its 95% t interval; without a width where there is one seed."""

    mean: float
    half: float  # NaN for one seed
    num: int

    @staticmethod
    def of(values: Sequence[float]) -> Interval:
        """Mean and interval of at least one value."""
        num = len(values)
        half = t_quantile(num - 1) * statistics.stdev(values) / math.sqrt(num) if num > 1 else math.nan
        return Interval(statistics.fmean(values), half, num)

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half


@dataclass(frozen=True)
class RunCurve:
    """One run: an evaluation is a point, with what was spent until then; a training step is a row."""

    algorithm: str
    seed: int
    axes: Mapping[Axis, tuple[float, ...]]  # per evaluation, each rising from 0
    evaluations: tuple[Mapping[str, float], ...]
    steps: tuple[Mapping[str, Any], ...]
    is_done: bool = True

    @property
    def accuracy(self) -> tuple[float, ...]:
        """Held-out avg@n per evaluation."""
        return tuple(row[ACCURACY] for row in self.evaluations)

    def at(self, axis: Axis, where: float) -> float | None:
        """Accuracy there, on the straight line between two evaluations; None beyond the last one."""
        places = self.axes[axis]
        if not places or not places[0] <= where <= places[-1]:
            return None
        i = bisect_left(places, where)
        if places[i] == where:
            return self.accuracy[i]
        share = (where - places[i - 1]) / (places[i] - places[i - 1])
        return self.accuracy[i - 1] * (1 - share) + self.accuracy[i] * share

    def total(self, axis: Axis) -> float:
        """What the run spent until its last evaluation."""
        return self.axes[axis][-1] if self.axes[axis] else 0.0


def read_run(folder: Path, algorithm: str, seed: int, clock: str = "time/step") -> RunCurve:
    """A run from its log; `clock` names the seconds of a step: time/step (wall) or time/cpu (processor)."""
    rows = read_log(folder / LOG_FILE)
    steps = [row for row in rows if "progress" in row]
    spent_tokens, spent_seconds = [0.0], [0.0]  # after so many steps
    for row in steps:
        spent_tokens.append(float(row["tokens_trained"]))
        spent_seconds.append(spent_seconds[-1] + row[clock])
    evaluations = [row for row in rows if ACCURACY in row and row["step"] <= len(steps)]
    return RunCurve(
        algorithm,
        seed,
        {
            "step": tuple(float(row["step"]) for row in evaluations),
            "tokens": tuple(spent_tokens[row["step"]] for row in evaluations),
            "seconds": tuple(spent_seconds[row["step"]] for row in evaluations),
        },
        tuple(evaluations),
        tuple(steps),
        (folder / SUMMARY_FILE).exists(),
    )


def read_all(out: Path, algorithms: Sequence[str], seeds: Sequence[int], clock: str) -> list[RunCurve]:
    """Every run that has an evaluation, in this order of algorithms and seeds."""
    curves = [
        read_run(folder, algorithm, seed, clock)
        for algorithm in algorithms
        for seed in seeds
        if ((folder := out / algorithm / f"seed-{seed}") / LOG_FILE).exists()
    ]
    return [curve for curve in curves if curve.evaluations]


def over_seeds(curves: Sequence[RunCurve], algorithm: str, axis: Axis, where: float) -> Interval | None:
    """Accuracy of an algorithm there; None unless every one of its runs got that far."""
    mine = [curve for curve in curves if curve.algorithm == algorithm]
    values = [value for curve in mine if (value := curve.at(axis, where)) is not None]
    return Interval.of(values) if mine and len(values) == len(mine) else None


def paired(curves: Sequence[RunCurve], algorithm: str, base: str, axis: Axis, where: float) -> Interval | None:
    """Accuracy minus that of `base`, over the seeds that both have: same data, same start, same prompts."""
    mine, others = ({c.seed: c.at(axis, where) for c in curves if c.algorithm == name} for name in (algorithm, base))
    pairs = [(mine[seed], others[seed]) for seed in mine if seed in others]
    differences = [one - other for one, other in pairs if one is not None and other is not None]
    return Interval.of(differences) if pairs and len(differences) == len(pairs) else None


def places(curves: Sequence[RunCurve], axis: Axis) -> list[float]:
    """Where to compare by default, rounded down (tokens and seconds to two digits).

    Steps: the quarters of what every complete run has. Seconds: the same of the shortest. Trained tokens, of which
    algorithms differ by far: the least, the middle and the most that an algorithm has in the end, in its shortest run.
    """
    done = [curve for curve in curves if curve.is_done] or list(curves)
    if axis != "tokens":
        least = min(curve.total(axis) for curve in done)
        found = [least * quarter / 4 for quarter in (1, 2, 3, 4)]
    else:
        names = dict.fromkeys(curve.algorithm for curve in done)
        ends = sorted(min(c.total(axis) for c in done if c.algorithm == name) for name in names)
        found = [ends[0], statistics.median_low(ends), ends[-1]]
    return sorted({float(int(place)) if axis == "step" else round_down(place) for place in found})


def round_down(value: float) -> float:
    """To two digits, so that every run that has `value` has the result."""
    if value <= 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.floor(value / unit + 1e-9) * unit:.6g}")
