"""Results as people and programs read them: a table on the screen, SET.json, summary.csv and report.md."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from d3s_megatron.data.sets import NUM_PROBLEMS
from d3s_megatron.evaluate import paper
from d3s_megatron.evaluate.estimators import Estimate
from d3s_megatron.evaluate.generations import write_whole
from d3s_megatron.evaluate.summary import Evaluation, average
from d3s_megatron.report.text import in_columns

CSV_FILE, REPORT_FILE = "summary.csv", "report.md"
AVERAGE = "average"

_PASS = {
    "unbiased": "the share of all draws of k answers that hold a right one",
    "first": "whether the first k answers hold a right one",
}

Rows = list[list[str]]


def table(evaluations: Sequence[Evaluation]) -> Rows:
    """Headings and one row a set, in percent with 95% intervals; an average below where there are several sets."""
    columns = list(dict.fromkeys(column for one in evaluations for column in one.per_problem))
    rows = [["set", "problems", "answers", *columns, "tokens", "cut", "right", "wrong", "no answer", "other"]]
    for one in evaluations:
        found = _columns(one)
        counts = one.statuses
        rows.append(
            [
                one.name,
                str(one.num_problems),
                str(one.num_samples),
                *(_cell(found.get(column)) for column in columns),
                f"{one.response_length:.0f}",
                f"{100 * one.cut_share:.1f}",
                *(str(counts[name]) for name in ("right", "wrong", "no_answer")),
                str(sum(num for name, num in counts.items() if name not in ("right", "wrong", "no_answer"))),
            ]
        )
    if len(evaluations) > 1:
        found = average(evaluations)
        rows.append([AVERAGE, "", "", *(_cell(found.get(column)) for column in columns), *[""] * 6])
    return rows


def beside_paper(evaluations: Sequence[Evaluation], model: str) -> Rows:
    """The paper's rows, then ours; a set stands here only where all its problems were asked."""
    rows = [["Pass@1 / Pass@8, %", *paper.SETS, AVERAGE]]
    rows += [[name, *map(paper.text_of, cells)] for name, cells in paper.RESULTS.items()]
    whole = {one.name: one for one in evaluations if one.num_problems == NUM_PROBLEMS.get(one.name)}
    ours = [_columns(whole[name]) if name in whole else None for name in paper.SETS]
    ours.append(average([whole[name] for name in paper.SETS]) if len(whole) == len(paper.SETS) else None)
    rows.append([f"**{model}, here**", *(paper.text_of(_our_pair(found)) for found in ours)])
    return rows


def _our_pair(found: Mapping[str, Estimate] | None) -> paper.Pair:
    if found is None:
        return None
    one, eight = (100 * found[name].value if name in found else math.nan for name in ("pass@1", "pass@8"))
    return one, eight


def _columns(one: Evaluation) -> dict[str, Estimate]:
    return {f"pass@{k}": e for k, e in one.pass_at.items()} | {f"maj@{k}": e for k, e in one.maj_at.items()}


def _cell(one: Estimate | None) -> str:
    return "" if one is None else f"{100 * one.value:.1f} [{100 * one.low:.1f}, {100 * one.high:.1f}]"


def screen(evaluations: Sequence[Evaluation]) -> str:
    """The table for a terminal: the shares, and below them the counts, as all in one row would be too wide."""
    rows = table(evaluations)
    first_count = rows[0].index("tokens")
    counts = [[row[0], *row[first_count:]] for row in rows if row[0] != AVERAGE]
    return in_columns([row[:first_count] for row in rows]) + "\n\n" + in_columns(counts)


def as_markdown(rows: Rows) -> str:
    """The same for a report."""
    heading, *others = rows
    lines = [heading, ["---", *["---:"] * (len(heading) - 1)], *others]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


def as_csv(evaluations: Sequence[Evaluation]) -> str:
    """One row a set; shares between 0 and 1."""
    rows: list[dict[str, Any]] = []
    for one in evaluations:
        row: dict[str, Any] = {"set": one.name, "num_problems": one.num_problems, "num_samples": one.num_samples}
        for column, found in _columns(one).items():
            row |= {column: found.value, f"{column}_low": found.low, f"{column}_high": found.high}
        row |= {"mean_length": one.response_length, "cut_share": one.cut_share} | one.statuses
        rows.append(row)
    out = io.StringIO()
    writer = csv.DictWriter(out, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def report(evaluations: Sequence[Evaluation], model: str, settings: Mapping[str, Any]) -> str:
    """report.md."""
    part = [one for one in evaluations if one.num_problems < NUM_PROBLEMS.get(one.name, 0)]
    notes = [f"{one.name}: {one.num_problems} of its {NUM_PROBLEMS[one.name]} problems were asked." for one in part]
    notes += [f"{one.name}: {one.num_without_verdict} answers without a verdict count as not solved."
              for one in evaluations if one.num_without_verdict]  # fmt: skip
    lines = [
        f"# {model}",
        "",
        *([", ".join(f"{name} `{json.dumps(value)}`" for name, value in settings.items()), ""] if settings else []),
        f"Percent, with 95% bootstrap intervals over the problems. pass@k: {_PASS[evaluations[0].pass_kind]}. "
        "maj@k: the share of all draws of k answers whose most frequent answer is right.",
        "",
        as_markdown(table(evaluations)),
        "",
        *(f"- {note}" for note in notes),
        *([""] if notes else []),
        "## Beside the paper",
        "",
        "arXiv 2509.22115, 32 answers a problem, as third-party notes reprint it. A cell is empty where we know no "
        "number, or have not asked all problems of a set.",
        "",
        as_markdown(beside_paper(evaluations, model)),
        "",
        *(f"- {note}" for note in paper.NOTES),
        "",
    ]
    return "\n".join(lines)


def write_results(folder: Path, evaluations: Sequence[Evaluation], model: str, settings: Mapping[str, Any]) -> None:
    """Every file of results; the same bytes for the same evaluations."""
    for one in evaluations:
        write_whole(folder / f"{one.name}.json", json.dumps(one.as_json(), indent=2) + "\n")
    write_whole(folder / CSV_FILE, as_csv(evaluations))
    write_whole(folder / REPORT_FILE, report(evaluations, model, settings))
