"""The pictures of a comparison, after the paper's figures 2 to 4: SUR and KL, held-out accuracy, policy entropy.

Lines are means over seeds, with 95% t intervals around the accuracies. Panels beside one another hold a few algorithms
each, with the first one in grey in all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from d3s_megatron.ablate.results import AXES, Axis, Interval, RunCurve, over_seeds

LINES_PER_PANEL = 5
SMOOTH_OVER = 10  # steps, for what is noisy from batch to batch
POINTS = 33  # where curves over tokens or seconds are looked up
LABELS = {"step": "step", "tokens": "tokens trained on (log)", "seconds": "seconds of training"}

Points = list[tuple[float, Interval]]


def draw(curves: Sequence[RunCurve], folder: Path) -> list[Path]:
    """Writes accuracy.png, sur_kl.png and entropy.png as far as the logs have what they show; returns the files."""
    import matplotlib

    matplotlib.use("Agg")
    written = []
    accuracy = [("held-out accuracy", LABELS[axis], _accuracy(axis)) for axis in AXES]
    selection = [
        (f"SUR of the training set, mean of {SMOOTH_OVER} steps", "step", lambda mine: _logged(mine, "sur")),
        ("KL to the first weights, all rollouts", "step", lambda mine: _logged(mine, "probe/kl", smooth=1)),
    ]
    entropy = [("entropy of all rollouts (nats)", "step", lambda mine: _logged(mine, "probe/entropy", smooth=1))]
    if not any("probe/entropy" in row for curve in curves for row in curve.steps):
        selection[1] = ("KL to the first weights, kept tokens", "step", lambda mine: _logged(mine, "kl"))
        entropy = [("entropy of the kept rollouts (nats)", "step", lambda mine: _logged(mine, "entropy"))]
    for name, panels in (("accuracy", accuracy), ("sur_kl", selection), ("entropy", entropy)):
        path = folder / f"{name}.png"
        if _draw(curves, panels, path):
            written.append(path)
    return written


def panels_of(names: Sequence[str]) -> list[list[str]]:
    """The first algorithm with up to LINES_PER_PANEL others, and again with the next ones."""
    first, others = names[:1], names[1:]
    num = max(1, math.ceil(len(others) / LINES_PER_PANEL))
    size = math.ceil(len(others) / num)
    return [[*first, *others[i * size : (i + 1) * size]] for i in range(num)]


def _draw(curves: Sequence[RunCurve], rows: Sequence[tuple[str, str, Callable[..., Points]]], path: Path) -> bool:
    from matplotlib import pyplot

    names = list(dict.fromkeys(curve.algorithm for curve in curves))
    columns = panels_of(names)
    figure, axes = pyplot.subplots(
        len(rows), len(columns), figsize=(5.2 * len(columns) + 0.6, 3.1 * len(rows)), layout="constrained",
        sharey="row", sharex="row", squeeze=False,
    )  # fmt: skip
    anything = False
    for line, (title, label, points_of) in zip(axes, rows, strict=True):
        means: list[float] = []
        for axis, some in zip(line, columns, strict=True):
            for i, name in enumerate(some):
                points = points_of([curve for curve in curves if curve.algorithm == name])
                means += [one.mean for _, one in points]
                _line(axis, points, name, "0.45" if name == names[0] else f"C{i - 1}")
            axis.set_xlabel(label)
            if label == LABELS["tokens"]:  # algorithms differ by factors there
                axis.set_xscale("log")
            axis.grid(alpha=0.3)
            if axis.lines:
                axis.legend(fontsize=8, ncols=2)
        line[0].set_ylabel(title, fontsize=9)
        if means:  # what is far outside of it is an interval of a few seeds, which would press the lines flat
            room = max(max(means) - min(means), 1e-3) * 0.35
            bottom, top = line[0].get_ylim()
            line[0].set_ylim(max(bottom, min(means) - room), min(top, max(means) + room))
            anything = True
    if anything:
        figure.savefig(path, dpi=80)
    pyplot.close(figure)
    return anything


def _line(axis, points: Points, name: str, color: str) -> None:
    if not points:
        return
    where = [place for place, _ in points]
    axis.plot(where, [one.mean for _, one in points], color=color, lw=1.6, label=name)
    if points[0][1].num > 1 and not math.isnan(points[0][1].half):
        axis.fill_between(
            where, [one.low for _, one in points], [one.high for _, one in points], color=color, alpha=0.12, lw=0
        )


def _accuracy(axis: Axis) -> Callable[[Sequence[RunCurve]], Points]:
    """Mean and interval over seeds as far as all of them got; at the evaluations themselves over steps."""

    def points(mine: Sequence[RunCurve]) -> Points:
        end = min(curve.total(axis) for curve in mine)
        where = {
            "step": list(mine[0].axes["step"]),
            "tokens": [end * 100 ** (i / (POINTS - 1) - 1) for i in range(POINTS)],  # from a hundredth on
            "seconds": [end * i / (POINTS - 1) for i in range(POINTS)],
        }[axis]
        name = mine[0].algorithm
        found = [(place, over_seeds(mine, name, axis, place)) for place in where if place <= end]
        return [(place, one) for place, one in found if one is not None]

    return points


def _logged(mine: Sequence[RunCurve], name: str, smooth: int = SMOOTH_OVER) -> Points:
    """Mean over seeds of what the steps log, as a running mean over `smooth` of them, without an interval."""
    num = min(len(curve.steps) for curve in mine)
    points = []
    for step in range(0, num):
        values = [curve.steps[i].get(name) for curve in mine for i in range(max(0, step - smooth + 1), step + 1)]
        there = [value for value in values if value is not None]
        if there and (smooth > 1 or len(there) == len(mine)):
            points.append((float(step), Interval(sum(there) / len(there), math.nan, len(mine))))
    return points
