"""The tables of a comparison: accuracy at fixed steps, trained tokens and seconds; terminal, Markdown and CSV."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from d3s_megatron.ablate.results import AXES, Axis, Interval, RunCurve, over_seeds, paired
from d3s_megatron.report.text import in_columns

HEADINGS = {"step": "{} steps", "tokens": "{} tokens", "seconds": "{} s"}
TITLES = {
    "step": "Held-out accuracy at fixed steps",
    "tokens": "Held-out accuracy at fixed trained tokens",
    "seconds": "Held-out accuracy at fixed training time",
}


@dataclass(frozen=True)
class Table:
    """Rows of text under headings."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def as_markdown(self) -> str:
        """With its title as a heading."""
        lines = [self.headings, ("---",) * len(self.headings), *self.rows]
        return f"### {self.title}\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"

    def as_text(self) -> str:
        """In columns, for the terminal."""
        return f"{self.title}\n{in_columns((self.headings, *self.rows))}\n"


@dataclass(frozen=True)
class Cell:
    """One number of a comparison, for the CSV."""

    algorithm: str
    measure: str  # accuracy, accuracy_minus_BASE, share_trained, seconds
    axis: str
    at: float
    interval: Interval


def compare(curves: Sequence[RunCurve], places: Mapping[Axis, Sequence[float]]) -> tuple[list[Table], list[Cell]]:
    """All tables and their numbers; the first algorithm is the one that the others are compared with.

    Args:
        curves: of one or more algorithms, in the order of the rows.
        places: per axis where to compare.
    """
    names = list(dict.fromkeys(curve.algorithm for curve in curves))
    tables, cells = [], []
    for axis in AXES:
        rows = []
        for name in names:
            row = [name]
            for where in places[axis]:
                found = over_seeds(curves, name, axis, where)
                row.append(_text(found))
                cells += [Cell(name, "accuracy", axis, where, found)] if found else []
            if axis == "step" and len(names) > 1:
                difference = paired(curves, name, names[0], axis, places[axis][-1]) if name != names[0] else None
                row.append(_text(difference, signed=True))
                cells += (
                    [Cell(name, f"accuracy_minus_{names[0]}", axis, places[axis][-1], difference)] if difference else []
                )
            rows.append(tuple(row))
        headings = ["algorithm", *(HEADINGS[axis].format(f"{where:,.6g}") for where in places[axis])]
        if axis == "step" and len(names) > 1:
            headings.append(f"minus {names[0]}, by seed")
        tables.append(Table(TITLES[axis], tuple(headings), tuple(rows)))
    spent, more = _spent(curves, names)
    return [*tables, spent], cells + more


def _spent(curves: Sequence[RunCurve], names: Sequence[str]) -> tuple[Table, list[Cell]]:
    rows, cells = [], []
    for name in names:
        mine = [curve for curve in curves if curve.algorithm == name]
        last = [curve.steps[-1] for curve in mine]
        share = Interval.of([row["tokens_trained"] / max(1, row["tokens_generated"]) for row in last])
        seconds = Interval.of([curve.total("seconds") for curve in mine])
        cells += [
            Cell(name, "share_trained", "end", float("nan"), share),
            Cell(name, "seconds", "end", float("nan"), seconds),
        ]
        tokens = Interval.of([float(row["tokens_trained"]) for row in last])
        seeds = f"{len(mine)}" + (
            "" if all(c.is_done for c in mine) else f", {sum(not c.is_done for c in mine)} not done"
        )
        rows.append((name, seeds, f"{tokens.mean:,.0f}", f"{share.mean:.3f}", _text(seconds, form=".1f")))
    headings = ("algorithm", "seeds", "tokens trained", "of those generated", "seconds of training")
    return Table("What was spent", headings, tuple(rows)), cells


def _text(interval: Interval | None, signed: bool = False, form: str = ".3f") -> str:
    if interval is None:
        return "-"
    mean = f"{interval.mean:{'+' if signed else ''}{form}}"
    return mean if interval.num == 1 else f"{mean} ± {interval.half:{form}}"


def write_csv(cells: Sequence[Cell], path: Path) -> None:
    """One row a number, with full digits."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("algorithm", "measure", "axis", "at", "num_seeds", "mean", "low", "high"))
        for cell in cells:
            one = cell.interval
            at = "" if cell.at != cell.at else f"{cell.at:g}"
            ends = ("", "") if one.num == 1 else (f"{one.low:.6f}", f"{one.high:.6f}")
            writer.writerow((cell.algorithm, cell.measure, cell.axis, at, one.num, f"{one.mean:.6f}", *ends))


def write_curves(curves: Sequence[RunCurve], path: Path) -> None:
    """One row an evaluation: what the pictures and the tables are made of."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        measures = sorted(
            {key for curve in curves for row in curve.evaluations for key in row if key.startswith("eval/pass@")}
        )
        measures.sort(key=lambda name: int(name.rpartition("@")[2]))
        writer.writerow(
            ("algorithm", "seed", "step", "tokens_trained", "seconds", *(m.removeprefix("eval/") for m in measures))
        )
        for curve in curves:
            for i, row in enumerate(curve.evaluations):
                spent = [curve.axes[axis][i] for axis in AXES]
                values = [f"{row[m]:.6f}" if m in row else "" for m in measures]
                writer.writerow((curve.algorithm, curve.seed, *(f"{place:.10g}" for place in spent), *values))
