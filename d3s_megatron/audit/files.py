"""Names of a run's audit and rollout files, how they are written, and how they are removed again."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

AUDIT, ROLLOUTS = "audit", "rollouts"
# Borders of the histogram of abs(A) x H: the same at every step, so steps can be compared. 8 bins a decade; the first
# bin is everything below (zero above all), the last everything above.
HISTOGRAM_EDGES = tuple(10 ** (-6 + i / 8) for i in range(65))
META = b"d3s"  # the key of a file's JSON record in its schema


def audit_file(run: Path, step: int) -> Path:
    """The audit of a training step, which counts from 0; the name counts from 1."""
    return run / AUDIT / f"step-{step + 1:06d}.parquet"


def rollout_file(run: Path, step: int, rank: int) -> Path:
    """What one rank sampled in a training step, which counts from 0."""
    return run / ROLLOUTS / f"step-{step + 1:06d}.rank-{rank:05d}.arrow"


def step_of(path: Path) -> int:
    """The training step, from 0, that a file of either kind is of."""
    return int(path.name.removeprefix("step-")[:6]) - 1


def files_of(run: Path, kind: str) -> list[Path]:
    """All whole files of one kind, by step."""
    return sorted((run / kind).glob("step-*"))


def write_table(table: pa.Table, meta: dict[str, Any], path: Path) -> None:
    """Writes a .parquet or .arrow file, there as a whole or not at all; `meta` must hold finite numbers only."""
    table = table.replace_schema_metadata({META: json.dumps(meta, allow_nan=False)})
    beside = path.with_name(f".{path.name}.new")
    if path.suffix == ".arrow":
        with pa.ipc.new_file(beside, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as file:
            file.write_table(table)
    else:
        words = [field.name for field in table.schema if pa.types.is_dictionary(field.type)]
        pq.write_table(table, beside, compression="zstd", write_statistics=False, use_dictionary=words)
    os.replace(beside, path)


@dataclass(frozen=True)
class AuditFile:
    """One step's audit; rows are in uid order."""

    meta: dict[str, Any]
    table: pa.Table


def read_audit(path: Path) -> AuditFile:
    """Reads an audit file whole."""
    table = pq.read_table(path)
    return AuditFile(json.loads(table.schema.metadata[META]), table)


def read_meta(path: Path) -> dict[str, Any]:
    """The JSON record of an audit file, without its columns."""
    return json.loads(pq.read_schema(path).metadata[META])


def drop_from(run: Path, step: int) -> int:
    """Removes what an earlier process wrote of `step` (from 0) and later ones; returns how many files that were."""
    return _remove(path for kind in (AUDIT, ROLLOUTS) for path in _of_steps(run / kind, lambda s: s >= step))


def drop_rollouts_before(run: Path, step: int) -> int:
    """Removes saved rollouts of steps before `step` (from 0); returns how many files that were."""
    return _remove(_of_steps(run / ROLLOUTS, lambda s: s < step))


def _of_steps(folder: Path, wanted) -> Iterator[Path]:
    for path in folder.glob("step-*"):
        if wanted(step_of(path)):
            yield path
    yield from folder.glob(".step-*.new")  # cut short while it was written


def _remove(paths: Iterable[Path]) -> int:
    num = 0
    for path in list(paths):
        path.unlink(missing_ok=True)
        num += 1
    return num
