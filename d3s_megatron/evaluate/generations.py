"""Files of generated answers: written chunk by chunk, whole or not at all, and graded again at any time.

    OUT/generations/SET.jsonl          one answer a line, in the order of the problems and their samples
    OUT/generations/SET.parts/*.jsonl  chunks of a run that has not ended

A chunk is written beside its name, fsync'ed and renamed, so that a killed process leaves whole chunks only. The file of
a set is written from its chunks in the same way. Nothing in a line depends on who wrote it or when.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from d3s_megatron.types import Prompt, Rollout

FOLDER = "generations"


@dataclass(frozen=True)
class Generation:
    """One answer as it stands in a file. It carries its gold, so that it can be graded without the data set."""

    id: str  # of the problem
    sample: int  # 0..n-1
    gold: str
    prompt: str  # digest of the prompt's text and gold; empty where the answer came from elsewhere
    num_tokens: int
    finish: str  # stop, or length where it was cut
    text: str

    @staticmethod
    def new(rollout: Rollout, sample: int) -> Generation:
        """A rollout that has just come."""
        prompt = rollout.request.prompt
        return Generation(
            id=prompt.id,
            sample=sample,
            gold=prompt.answer,
            prompt=digest(prompt),
            num_tokens=len(rollout.token_ids),
            finish=rollout.finish_reason,
            text=rollout.text,
        )


def digest(prompt: Prompt) -> str:
    """What tells whether a problem is still asked and graded in the same way."""
    return hashlib.sha256(f"{prompt.text}\0{prompt.answer}".encode()).hexdigest()[:12]


class Generations:
    """The answers to one set in an output folder."""

    def __init__(self, folder: str | Path, name: str) -> None:
        self.name = name
        self.path = Path(folder) / FOLDER / f"{name}.jsonl"
        self.parts = self.path.with_suffix(".parts")

    def write_chunk(self, number: int, rows: Sequence[Generation]) -> None:
        """Adds a chunk of answers; it is there as a whole once this returns."""
        self.parts.mkdir(parents=True, exist_ok=True)
        write_whole(self.parts / f"{number:08}.jsonl", lines(rows))

    def read(self) -> dict[tuple[str, int], Generation]:
        """All answers by (problem, sample), those of chunks included."""
        found: dict[tuple[str, int], Generation] = {}
        for path in (self.path, *sorted(self.parts.glob("*.jsonl"))):
            if path.exists():
                for row in read_rows(path):
                    found.setdefault((row.id, row.sample), row)
        return found

    def merge(self, ids: Sequence[str]) -> None:
        """Writes SET.jsonl from what is there, problems in the order of `ids`, and removes the chunks."""
        if not self.parts.is_dir():
            return
        place = {id: number for number, id in enumerate(ids)}
        rows = sorted(self.read().values(), key=lambda row: (place[row.id], row.sample))
        write_whole(self.path, lines(rows))
        shutil.rmtree(self.parts)


def lines(rows: Iterable[Generation | dict[str, Any]]) -> str:
    """Rows as JSON lines; the same bytes for the same rows."""
    plain = (row if isinstance(row, dict) else asdict(row) for row in rows)
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in plain)


def write_whole(path: Path, text: str) -> None:
    """Writes a file that is there as a whole or not at all, also after the machine went down."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.new")
    # A sampled byte-level token may be half a character, which decoders give as a lone surrogate at the worst.
    with beside.open("wb") as file:
        file.write(text.encode("utf-8", "backslashreplace"))
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_rows(path: Path) -> list[Generation]:
    """Answers of a file of generations; ValueError names the line that is none, and what a row holds."""
    names = Generation.__dataclass_fields__
    rows = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
                missing = [name for name in names if name not in row and name != "prompt"]
                if missing:
                    raise ValueError(f"{', '.join(missing)} missing")
                rows.append(_row({"prompt": ""} | {name: row[name] for name in names if name in row}))
            except (ValueError, TypeError) as error:
                raise ValueError(
                    f"{path}:{number}: no row of generations ({error}); a line is a JSON object with "
                    f"{', '.join(names)} (prompt may be left out)"
                ) from error
    return rows


def _row(row: dict[str, Any]) -> Generation:
    for name, kind in (("text", str), ("gold", str), ("sample", int), ("num_tokens", int)):
        if type(row[name]) is not kind:
            raise ValueError(f"{name} is {row[name]!r}, not {'text' if kind is str else 'a whole number'}")
    if row["finish"] not in ("stop", "length"):
        raise ValueError(f"finish is {row['finish']!r}, not stop or length")
    return Generation(**(row | {"id": str(row["id"])}))


def by_problem(rows: Iterable[Generation], name: str) -> list[list[Generation]]:
    """Answers [P][n] in the order of the file; ValueError where a problem lacks some, or has some twice."""
    problems: dict[str, list[Generation]] = {}
    for row in rows:
        problems.setdefault(row.id, []).append(row)
    if not problems:
        raise ValueError(f"set {name}: its file of generations is empty")
    most = max(map(len, problems.values()))
    for id, answers in problems.items():
        answers.sort(key=lambda row: row.sample)
        if [row.sample for row in answers] != list(range(most)):
            raise ValueError(
                f"set {name}: problem {id} has samples {[row.sample for row in answers]}, where 0 to {most - 1} are "
                "needed; let the run that generates them end (the same command goes on), or mend the file"
            )
    return list(problems.values())
