"""Evaluation sets by name: a folder that holds NAME.jsonl (or NAME.parquet), itself or in its subfolder `eval`.

The seven of the paper are known with their number of problems; any other file in the folder is a set too.
"""

from __future__ import annotations

from pathlib import Path

from d3s_megatron.data.config import DataConfig
from d3s_megatron.data.problems import Problem, load_problems

NUM_PROBLEMS = {
    "aime24": 30,
    "aime25": 30,
    "amc23": 40,
    "gsm8k": 1319,
    "math500": 500,
    "minerva": 272,
    "olympiadbench": 675,
}
"""The paper's sets in the order of its tables, and how many problems each has."""


def load_set(folder: str | Path, name: str, limit: int | None = None) -> list[Problem]:
    """Problems of one set in file order, the first `limit` of them.

    A row has `id`, `problem` and `answer`. Raises ValueError with the places looked in and a remedy.
    """
    places = [Path(folder), Path(folder) / "eval"]
    files = [place / f"{name}.{ending}" for place in places for ending in ("jsonl", "parquet")]
    found = next((file for file in files if file.is_file()), None)
    if found is None:
        there = (file for place in places for ending in ("jsonl", "parquet") for file in place.glob(f"*.{ending}"))
        others = ", ".join(sorted({file.stem for file in there})) or "none"
        raise ValueError(
            f"set {name!r}: no {name}.jsonl in {places[0]} or {places[1]} (sets there: {others}); give --data FOLDER, "
            "or fetch them where the network allows: python -m d3s_megatron.data.fetch --out data"
        )
    return load_problems(found, DataConfig(limit=limit))
