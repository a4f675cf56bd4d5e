"""A run's folder, finished or not, as what the report's page shows of it: plain numbers and text."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from d3s_megatron.audit.files import AUDIT, HISTOGRAM_EDGES, AuditFile, files_of, read_audit, read_meta, step_of
from d3s_megatron.data.sets import NUM_PROBLEMS
from d3s_megatron.evaluate import paper
from d3s_megatron.report.log_file import LOG_FILE
from d3s_megatron.report.panels import PANELS, SERIES
from d3s_megatron.report.thin import MOST_POINTS, spread, thin
from d3s_megatron.report.trackers import flat

DIGITS = 6  # significant, of every number in the page
MOST_SELECTIONS = 200  # audits that the pictures of the selection are made of
TIMES = "time/"
# Settings shown for a run alone; of several, those that differ are shown.
MAIN_SETTINGS = (
    *("model.path", "data.train_path", "algorithm.name", "algorithm.samples_per_prompt"),
    *("algorithm.kept_per_prompt_init", "algorithm.kept_per_prompt_final", "algorithm.token_share_init"),
    *("algorithm.token_share_final", "optimizer.lr", "train.steps", "train.prompts_per_step", "train.seed"),
)


@dataclass
class Skipped:
    """What could not be read, by kind; a run that goes on may remove a file that was just there."""

    log_lines: int = 0
    audits: int = 0

    def __str__(self) -> str:
        parts = [f"{self.log_lines} lines of the log"] * bool(self.log_lines)
        return ", ".join(parts + [f"{self.audits} audits"] * bool(self.audits))


def read_rows(path: Path, skipped: Skipped) -> list[dict[str, Any]]:
    """The whole lines of a log; a last line that is being written is left out, any other bad one counted."""
    rows = []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines):
        try:
            row = json.loads(line)
            assert isinstance(row, dict) and isinstance(row.get("step"), int)
            rows.append(row)
        except (ValueError, AssertionError):
            skipped.log_lines += bool(line) and number < len(lines) - 1
    return rows


def curves(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """{"x": {step, tokens, seconds: one each a row}, "series": {name: [indices into them, values]}}.

    A training step stands at the number of steps done after it, as an evaluation does. Seconds are those of training
    steps, summed; an evaluation's own time is not in them.
    """
    x: dict[str, list[float | None]] = {"step": [], "tokens": [], "seconds": []}
    places: dict[str, list[int]] = {}
    values: dict[str, list[float | None]] = {}
    tokens, seconds = 0, 0.0
    for place, row in enumerate(rows):
        trained = "progress" in row
        if trained:
            tokens = row.get("tokens_trained") or tokens
            seconds += row.get("time/step") or 0.0
        x["step"].append(row["step"] + trained)
        x["tokens"].append(tokens)
        x["seconds"].append(rounded(seconds))
        for name, value in row.items():
            if name in SERIES and (value is None or isinstance(value, int | float)):
                places.setdefault(name, []).append(place)
                values.setdefault(name, []).append(rounded(value))
    series = {}
    for name, column in values.items():
        if any(value is not None for value in column):
            few = thin(column, MOST_POINTS)
            series[name] = [[places[name][i] for i in few], [column[i] for i in few]]
    return {"x": x, "series": series}


def rounded(value: Any) -> float | None:
    """A number with DIGITS significant digits; None where it is not finite."""
    if value is None or isinstance(value, bool):
        return None if value is None else float(value)
    if isinstance(value, int):
        return value
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None


def stage_seconds(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Mean seconds a step of every stage, what no stage took under "other"."""
    steps = [row for row in rows if "progress" in row and row.get("time/step") is not None]
    if not steps:
        return {}
    names = list(dict.fromkeys(name for row in steps for name in row if name.startswith(TIMES)))
    means = {n.removeprefix(TIMES): sum(row.get(n) or 0.0 for row in steps) / len(steps) for n in names}
    whole = means.pop("step")
    for name in ("probe", "cpu"):  # no part of a step; processor seconds of all of it
        means.pop(name, None)
    means["other"] = max(0.0, whole - sum(means.values()))
    return {name: rounded(value) for name, value in means.items()}


def selections(files: Sequence[Path], skipped: Skipped) -> dict[str, Any]:
    """Why rollouts were dropped and where the scores stood, over the steps."""
    metas = []
    for i in spread(len(files), MOST_SELECTIONS):
        meta = _try(read_meta, files[i], skipped)
        if meta is not None:
            metas.append(meta)
    names = list(dict.fromkeys(name for meta in metas for name in meta["reasons"]))
    shares = []
    for meta in metas:
        total = sum(meta["reasons"].values()) or 1
        shares.append({name: num / total for name, num in meta["reasons"].items()})
    return {
        "steps": [meta["step"] + 1 for meta in metas],
        "reasons": {name: [rounded(share.get(name, 0.0)) for share in shares] for name in names},
        "all": [meta["histogram"]["all"] for meta in metas],
        "kept": [meta["histogram"]["kept"] for meta in metas],
        "threshold": [rounded(meta["threshold"]) for meta in metas],
    }


def _try(read, path: Path, skipped: Skipped) -> Any:
    try:
        return read(path)
    except (OSError, KeyError, ValueError):  # pyarrow's errors are among them; the run goes on and may remove files
        skipped.audits += 1
        return None


def token_steps(files: Sequence[Path], most_tokens: int, skipped: Skipped) -> list[dict[str, Any]]:
    """Steps whose audit holds tokens, spread evenly over the run, together at most `most_tokens` tokens, or one."""
    with_tokens = []
    for path in files:
        meta = _try(read_meta, path, skipped)
        if meta is not None and meta["prompts"]:
            with_tokens.append(path)
    # The tokens of the last one say how many steps fit.
    last = _try(read_audit, with_tokens[-1], skipped) if with_tokens else None
    if last is None:
        return []
    size = max(1, sum(len(ids) for ids in last.table["token_ids"].to_pylist() if ids is not None))
    chosen = [with_tokens[i] for i in spread(len(with_tokens), max(1, most_tokens // size))]
    audits = [_try(read_audit, path, skipped) for path in chosen[:-1]] + [last]
    return [_token_step(audit) for audit in audits if audit is not None]


def _token_step(audit: AuditFile) -> dict[str, Any]:
    meta = audit.meta
    prompts = {int(group): {**prompt, "rollouts": []} for group, prompt in meta["prompts"].items()}
    for row in audit.table.to_pylist():
        if row["group"] not in prompts or row["pieces"] is None:
            continue
        shown = {name: row[name] for name in ("uid", "status", "length", "truncated", "kept", "reason")}
        shown |= {name: rounded(row[name]) for name in ("reward", "advantage", "num_kept_tokens")}
        shown["pieces"] = row["pieces"]
        if row["score"] is not None:
            shown["score"] = [_short(value) for value in row["score"]]
            shown["entropy"] = [_short(value) for value in row["entropy"]]
            shown["mask"] = "".join("01"[kept] for kept in row["token_kept"])
        prompts[row["group"]]["rollouts"].append(shown)
    return {
        "step": meta["step"] + 1,
        "N": meta["row"]["N"],
        "rho": rounded(meta["row"]["rho"]),
        "threshold": rounded(meta["threshold"]),
        "histogram": meta["histogram"],
        "prompts": list(prompts.values()),
    }


def _short(value: float | None) -> float | None:
    return float(f"{value:.3g}") if value is not None and math.isfinite(value) else None


def collect_run(folder: Path, name: str, most_tokens: int, skipped: Skipped) -> dict[str, Any]:
    """Everything the page shows of one run."""
    rows = read_rows(folder / LOG_FILE, skipped)
    config = folder / "config.yaml"
    settings = flat(yaml.safe_load(config.read_text()) or {}) if config.exists() else {}
    files = files_of(folder, AUDIT)
    steps = [row["step"] + 1 for row in rows if "progress" in row]
    return {
        "name": name,
        "algorithm": settings.get("algorithm.name", ""),
        "steps_done": max(steps, default=0),
        "steps": settings.get("train.steps") or max(steps, default=0),
        "settings": settings,
        **curves(rows),
        "stages": stage_seconds(rows),
        "selection": selections(files, skipped),
        "tokens": token_steps(files, most_tokens, skipped),
        "last_audit": step_of(files[-1]) + 1 if files else None,
    }


def settings_table(runs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Settings that differ between the runs, one a row; those of MAIN_SETTINGS for a run alone."""
    names = list(dict.fromkeys(name for run in runs for name in run["settings"]))
    if len(runs) == 1:
        names = [name for name in MAIN_SETTINGS if name in names]
    else:
        names = [n for n in names if n != "train.output_dir" and len({str(r["settings"].get(n)) for r in runs}) > 1]
    return [[name, *(_text(run["settings"].get(name)) for run in runs)] for name in names]


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _percent(row: Mapping[str, str], name: str) -> float:
    return float(row.get(name) or "nan") * 100


def paper_table(folders: Mapping[str, Path]) -> dict[str, Any]:
    """The paper's rows and, below, ours: what `d3s_megatron.evaluate` wrote into a run's folder, or any folder given.

    A cell is empty where no number is known; ours only stand where all problems of a set were asked.
    """
    rows = [[name, *map(paper.text_of, cells)] for name, cells in paper.RESULTS.items()]
    ours = []
    for name, folder in folders.items():
        for path in sorted([*folder.glob("summary.csv"), *folder.glob("*/summary.csv")]):
            with path.open(newline="", encoding="utf-8") as file:
                found = {row["set"]: row for row in csv.DictReader(file)}
            whole = [row for n in paper.SETS if (row := found.get(n)) and int(row["num_problems"]) == NUM_PROBLEMS[n]]
            pairs = {row["set"]: (_percent(row, "pass@1"), _percent(row, "pass@8")) for row in whole}
            cells = [paper.text_of(pairs.get(n)) for n in paper.SETS]
            average = ""
            if len(pairs) == len(paper.SETS):
                first, eighth = (sum(column) / len(pairs) for column in zip(*pairs.values(), strict=True))
                average = paper.text_of((first, eighth))
            cells.append(average)
            ours.append([name if path.parent == folder else f"{name}, {path.parent.name}", *cells])
    if not ours:
        ours = [[name, *[""] * (len(paper.SETS) + 1)] for name in folders]
    return {"columns": [*paper.SETS, "average"], "paper": rows, "ours": ours, "notes": list(paper.NOTES)}


def collect(folders: Mapping[str, Path], most_tokens: int, skipped: Skipped) -> dict[str, Any]:
    """The page's data. A folder without a log, but with results of d3s_megatron.evaluate, is in the paper's table only.

    Args:
        folders: name -> folder.
        most_tokens: of rollouts shown token by token, over all runs.
    """
    with_log = {name: folder for name, folder in folders.items() if (folder / LOG_FILE).is_file()}
    share = most_tokens // max(1, len(with_log))
    runs = [collect_run(folder, name, share, skipped) for name, folder in with_log.items()]
    table = settings_table(runs)
    for run in runs:
        del run["settings"]
    return {
        "runs": runs,
        "settings": table,
        "paper": paper_table(folders),
        "panels": [vars(panel) for panel in PANELS],
        "edges": [float(f"{edge:.4g}") for edge in HISTOGRAM_EDGES],
        "skipped": str(skipped),
    }
