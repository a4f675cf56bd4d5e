"""Files of problems: JSON lines or Parquet, read strictly, so that a bad row is met before the run and not in it.

Left out: nested fields, lists of chat messages and remote files. Flatten such a file once instead.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from d3s_megatron.data.config import DataConfig


@dataclass(frozen=True)
class Problem:
    """One row of a problem file. Example: Problem(id="gsm8k-3", problem="What is 6 * 7?", answer="42")."""

    id: str
    problem: str
    answer: str


def load_problems(path: str | Path, config: DataConfig) -> list[Problem]:
    """Problems of a .jsonl or .parquet file in file order, the first `config.limit` of them.

    Raises ValueError with the file, the line (JSONL) or row (Parquet) from 1, the field and a remedy.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such file; set data.train_path or data.eval_path to a .jsonl or .parquet file")
    if path.suffix == ".parquet":
        rows = _parquet_rows(path, config)
    elif path.suffix in (".jsonl", ".json"):
        rows = _json_rows(path)
    else:
        raise ValueError(f"{path}: unknown ending {path.suffix!r}; the file must end in .jsonl or .parquet")

    problems: list[Problem] = []
    seen: dict[str, str] = {}
    for number, where, row in rows:
        problem = _problem(number, where, row, path, config)
        if problem.id in seen:
            raise ValueError(
                f"{where}: field {config.id_field!r} is {problem.id!r} again (first at {seen[problem.id]}); "
                "ids must differ, or set data.id_field to null to number the rows"
            )
        seen[problem.id] = where
        problems.append(problem)
        if config.limit is not None and len(problems) == config.limit:
            break
    if not problems:
        raise ValueError(f"{path}: holds no problems; a run needs at least one row")
    return problems


def _json_rows(path: Path) -> Iterator[tuple[int, str, dict[str, Any]]]:
    # Read as bytes: text mode would also break lines at characters that JSON strings may contain.
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            where = f"{path}:{number}"
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            except UnicodeDecodeError as error:
                raise ValueError(f"{where}: not UTF-8 text ({error.reason}); save the file as UTF-8") from error
            if not line:
                continue
            try:
                # Numbers stay as written: 42 is "42", and 1.50 is not rounded through a float.
                row = json.loads(line, parse_int=str, parse_float=str, parse_constant=_no_constant)
            except ValueError as error:
                raise ValueError(f"{where}: broken row, not valid JSON ({error}); one object a line") from error
            if not isinstance(row, dict):
                raise ValueError(f"{where}: a {type(row).__name__} where an object with fields is needed")
            yield number, where, row


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _parquet_rows(path: Path, config: DataConfig) -> Iterator[tuple[int, str, dict[str, Any]]]:
    import pyarrow  # here and not at the top: a JSONL run does not pay for it
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a readable Parquet file ({error})") from error
    wanted = (config.problem_field, config.answer_field, config.id_field)
    present = [name for name in file.schema_arrow.names if name in wanted]
    for name in wanted[:2]:
        if name not in present:
            raise ValueError(_missing(str(path), name, file.schema_arrow.names, config))
    number = 0
    for batch in file.iter_batches(columns=present):
        for row in batch.to_pylist():
            number += 1
            yield number, f"{path} row {number}", row


def _problem(number: int, where: str, row: dict[str, Any], path: Path, config: DataConfig) -> Problem:
    problem = _text(row, config.problem_field, where, config)
    answer = _text(row, config.answer_field, where, config)
    if config.id_field is not None and row.get(config.id_field) is not None:
        name = _text(row, config.id_field, where, config)
    else:
        name = f"{path.stem}-{number}"
    return Problem(id=name, problem=problem, answer=answer)


def _text(row: dict[str, Any], field: str, where: str, config: DataConfig) -> str:
    if field not in row:
        raise ValueError(_missing(where, field, row, config))
    value = row[field]
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        value = str(value)
    if not isinstance(value, str):
        raise ValueError(
            f"{where}: field {field!r} is {value!r}, a {type(value).__name__}; it must be text or a number"
        )
    if not value.strip():
        raise ValueError(f"{where}: field {field!r} is empty; remove the row or fill it in")
    return value


def _missing(where: str, field: str, names: Any, config: DataConfig) -> str:
    option = {config.problem_field: "problem_field", config.answer_field: "answer_field"}.get(field, "id_field")
    found = ", ".join(names) or "none"
    return f"{where}: field {field!r} is missing (found: {found}); set data.{option} to the right name"
