"""Source blocks x target blocks -> byte moves, and how each is done in bounded memory.

Three kinds. Copy: one run of bytes. Scatter: full rows are read in bands and their column ranges written to several
places (import with tensor parallelism). Gather: column ranges are read and full rows written (export). disk.py says
how bytes come from and get to the disk.
"""

from __future__ import annotations

import errno
import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from d3s_megatron.convert.checkpoint.blocks import Block
from d3s_megatron.convert.checkpoint.disk import VIEW_BYTES, Bytes, Reader, Writer

# Bytes of a band of rows, and of a step of a copy
BAND_BYTES = VIEW_BYTES
# A copy is cut to this, so that workers share a large embedding and a killed run loses little.
COPY_BYTES = 64 * 2**20
# The kernel cannot copy between these two file systems, or not with this call: move the bytes ourselves.
_NO_KERNEL_COPY = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF}


@dataclass(frozen=True)
class Side:
    """One end of a move: where its first element lies, and the bytes from one row to the next."""

    file: Path
    dtype: torch.dtype
    offset: int
    stride: int


@dataclass(frozen=True)
class Move:
    """`rows` x `width` elements from one place to another."""

    source: Side
    target: Side
    rows: int
    width: int

    @property
    def nbytes(self) -> int:
        """Bytes written."""
        return self.rows * self.width * self.target.dtype.itemsize


@dataclass(frozen=True)
class Task:
    """What one worker does in one go: a copy (one move), or the moves of one band of rows."""

    kind: str  # copy, scatter, gather
    moves: tuple[Move, ...]

    @property
    def nbytes(self) -> int:
        """Bytes written."""
        return sum(move.nbytes for move in self.moves)


def plan(sources: Iterable[Block], targets: Iterable[Block]) -> list[Task]:
    """Tasks that fill every target block; ValueError names a tensor of which a part is missing or stored twice."""
    by_tensor: dict[str, list[Block]] = defaultdict(list)
    for block in sources:
        by_tensor[block.tensor].append(block)
    copies: list[Task] = []
    bands: dict[tuple, list[Move]] = defaultdict(list)
    for target in targets:
        found = 0
        for source in by_tensor[target.tensor]:
            move = overlap(source, target)
            if move is None:
                continue
            found += move.rows * move.width
            wide_source, wide_target = _is_wide(move, move.source), _is_wide(move, move.target)
            if not wide_source and not wide_target:
                copies += _cut(move)
            else:
                side, kind = (move.source, "scatter") if wide_source else (move.target, "gather")
                first_row = max(source.rows[0], target.rows[0])
                bands[kind, side.file, target.tensor, first_row, move.rows, side.stride].append(move)
        if found != target.elements:
            what = "missing" if found < target.elements else "stored twice"
            raise ValueError(
                f"a part of {target.tensor} is {what} in the source: {found} of {target.elements} elements"
            )
    for (kind, *_), moves in bands.items():
        if (
            kind == "gather"
            and sum(move.width for move in moves) * moves[0].target.dtype.itemsize != moves[0].target.stride
        ):
            raise ValueError(f"{moves[0].source.file} holds a tensor in an irregular grid: resave it with one layout")
    tasks = copies + [Task(kind, tuple(moves)) for (kind, *_), moves in bands.items()]
    return sorted(tasks, key=lambda task: (str(task.moves[0].target.file), task.moves[0].target.offset))


def overlap(source: Block, target: Block) -> Move | None:
    rows = max(source.rows[0], target.rows[0]), min(source.rows[1], target.rows[1])
    columns = max(source.columns[0], target.columns[0]), min(source.columns[1], target.columns[1])
    if rows[0] >= rows[1] or columns[0] >= columns[1]:
        return None

    def side(block: Block) -> Side:
        into = (rows[0] - block.rows[0]) * block.stride + (columns[0] - block.columns[0]) * block.dtype.itemsize
        return Side(block.file, block.dtype, block.offset + into, block.stride)

    return Move(side(source), side(target), rows[1] - rows[0], columns[1] - columns[0])


def _is_wide(move: Move, side: Side) -> bool:
    return move.rows > 1 and side.stride != move.width * side.dtype.itemsize


def _cut(move: Move) -> list[Task]:
    """A contiguous move as copies of bounded size."""
    total, step = move.rows * move.width, COPY_BYTES // move.target.dtype.itemsize
    tasks = []
    for at in range(0, total, step):
        source = Side(move.source.file, move.source.dtype, move.source.offset + at * move.source.dtype.itemsize, 0)
        target = Side(move.target.file, move.target.dtype, move.target.offset + at * move.target.dtype.itemsize, 0)
        tasks.append(Task("copy", (Move(source, target, 1, min(step, total - at)),)))
    return tasks


def run_task(task: Task, reader: Reader, writer: Writer) -> None:
    """Do one task; any OSError is the caller's to explain."""
    if task.kind == "copy":
        _copy(task.moves[0], reader, writer)
    elif task.kind == "scatter":
        _scatter(task.moves, reader, writer)
    else:
        _gather(task.moves, reader, writer)


def _copy(move: Move, reader: Reader, writer: Writer) -> None:
    source, target, done = move.source, move.target, 0
    if source.dtype == target.dtype and writer.direct(target.file) is None and hasattr(os, "copy_file_range"):
        done = _kernel_copy(move, reader, writer) // target.dtype.itemsize
    items = source.dtype.itemsize, target.dtype.itemsize
    step = BAND_BYTES // max(items)
    (stream,) = writer.streams([(target.file, target.offset + done * items[1], step * items[1])])
    for at in range(done, move.width, step):
        count = min(step, move.width - at)
        values = reader.view(source.file, source.offset + at * items[0], count * items[0])
        room = stream.room(count * items[1])
        np.copyto(room, _converted(values, source.dtype, target.dtype))
        stream.advance(len(room))
    stream.close()


def _kernel_copy(move: Move, reader: Reader, writer: Writer) -> int:
    """Copy inside the kernel; returns the bytes done, fewer than all where it cannot between these file systems."""
    source, target, done = reader.plain(move.source.file), writer.plain(move.target.file), 0
    while done < move.nbytes:
        at = move.source.offset + done, move.target.offset + done
        try:
            count = os.copy_file_range(source, target, move.nbytes - done, *at)
        except OSError as error:
            if error.errno not in _NO_KERNEL_COPY:
                raise
            return done // move.target.dtype.itemsize * move.target.dtype.itemsize
        if not count:
            raise ValueError(f"{move.source.file} ends early: it changed while it was converted")
        done += count
    return done


def _scatter(moves: tuple[Move, ...], reader: Reader, writer: Writer) -> None:
    one = moves[0].source
    item, stride = one.dtype.itemsize, one.stride
    base = min(move.source.offset for move in moves)
    span = max(move.source.offset + move.width * item for move in moves) - base
    step = max(1, BAND_BYTES // stride)
    streams = writer.streams(
        (move.target.file, move.target.offset, min(step, move.rows) * move.width * move.target.dtype.itemsize)
        for move in moves
    )
    for first, rows in _bands(moves[0].rows, step):
        band = reader.view(one.file, base + first * stride, (rows - 1) * stride + span)
        for move, stream in zip(moves, streams, strict=True):
            start = move.source.offset - base
            part = np.lib.stride_tricks.as_strided(band[start:], (rows, move.width * item), (stride, 1))
            room = stream.room(rows * move.width * move.target.dtype.itemsize).reshape(rows, -1)
            np.copyto(room, _converted(part, one.dtype, move.target.dtype))
            stream.advance(room.size)
    for stream in streams:
        stream.close()


def _gather(moves: tuple[Move, ...], reader: Reader, writer: Writer) -> None:
    one = moves[0].target
    item, stride = one.dtype.itemsize, one.stride
    base = min(move.target.offset for move in moves)
    step = max(1, BAND_BYTES // max(stride, *(move.source.stride for move in moves)))
    (stream,) = writer.streams([(one.file, base, min(step, moves[0].rows) * stride)])
    for first, rows in _bands(moves[0].rows, step):
        band = stream.room(rows * stride).reshape(rows, stride)
        for move in moves:
            at, width = move.source.offset + first * move.source.stride, move.width * move.source.dtype.itemsize
            part = reader.view(move.source.file, at, rows * width).reshape(rows, width)
            column = move.target.offset - base
            np.copyto(band[:, column : column + move.width * item], _converted(part, move.source.dtype, one.dtype))
        stream.advance(band.size)
    stream.close()


def _bands(rows: int, step: int) -> Iterable[tuple[int, int]]:
    return ((first, min(step, rows - first)) for first in range(0, rows, step))


def _converted(data: Bytes, dtype: torch.dtype, wanted: torch.dtype) -> Bytes:
    """The same elements in another dtype: [..., bytes] -> [..., bytes]."""
    if dtype == wanted:
        return data
    values = torch.from_numpy(data.copy()).view(dtype).to(wanted)  # a copy is aligned, whatever the file's offset is
    return values.view(torch.uint8).numpy()
