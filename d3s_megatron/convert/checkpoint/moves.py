"""Source blocks x target blocks -> byte moves, and how each is done in bounded memory.

Three kinds. Copy: one run of bytes, done inside the kernel where the dtype stays. Scatter: full rows are read in
bands and their column ranges written to several places (import with tensor parallelism). Gather: column ranges are
read and full rows written (export). Only the last two, and a change of dtype, pass through memory.
"""

from __future__ import annotations

import errno
import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from d3s_megatron.convert.checkpoint.blocks import Block

# Bytes of a band. Larger bands were no faster on the disk measured; a worker holds about three of them.
BAND_BYTES = 2 * 2**20
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


Open = Callable[[Path], int]  # path -> file descriptor


def run_task(task: Task, source: Open, target: Open) -> None:
    """Do one task; any OSError is the caller's to explain."""
    if task.kind == "copy":
        _copy(task.moves[0], source, target)
    elif task.kind == "scatter":
        _scatter(task.moves, source, target)
    else:
        _gather(task.moves, source, target)


def _copy(move: Move, source: Open, target: Open) -> None:
    reader, writer = source(move.source.file), target(move.target.file)
    at_source, at_target = move.source.offset, move.target.offset
    if move.source.dtype == move.target.dtype and hasattr(os, "copy_file_range"):
        left = move.nbytes
        try:
            while left:
                done = os.copy_file_range(reader, writer, left, at_source, at_target)
                if not done:
                    raise ValueError(f"{move.source.file} ends early: it changed while it was converted")
                left, at_source, at_target = left - done, at_source + done, at_target + done
            return
        except OSError as error:
            if error.errno not in _NO_KERNEL_COPY:
                raise
        done_elements = (move.nbytes - left) // move.target.dtype.itemsize
        at_source = move.source.offset + done_elements * move.source.dtype.itemsize
        at_target = move.target.offset + done_elements * move.target.dtype.itemsize
        elements = move.width - done_elements
    else:
        elements = move.width
    step = BAND_BYTES // max(move.source.dtype.itemsize, move.target.dtype.itemsize)
    for at in range(0, elements, step):
        count = min(step, elements - at)
        values = read_elements(
            reader, at_source + at * move.source.dtype.itemsize, count, move.source.dtype, move.source.file
        )
        _write(writer, at_target + at * move.target.dtype.itemsize, values.to(move.target.dtype))


def _scatter(moves: tuple[Move, ...], source: Open, target: Open) -> None:
    one = moves[0].source
    item, stride = one.dtype.itemsize, one.stride
    base = min(move.source.offset for move in moves)
    span = max(move.source.offset + move.width * item for move in moves) - base
    reader = source(one.file)
    for first, rows in _bands(moves[0].rows, stride):
        band = read_elements(reader, base + first * stride, ((rows - 1) * stride + span) // item, one.dtype, one.file)
        for move in moves:
            part = band.as_strided((rows, move.width), (stride // item, 1), (move.source.offset - base) // item)
            _write(
                target(move.target.file), move.target.offset + first * move.target.stride, part.to(move.target.dtype)
            )


def _gather(moves: tuple[Move, ...], source: Open, target: Open) -> None:
    one = moves[0].target
    item, stride = one.dtype.itemsize, one.stride
    base = min(move.target.offset for move in moves)
    writer = target(one.file)
    for first, rows in _bands(moves[0].rows, stride):
        band = torch.empty(rows, stride // item, dtype=one.dtype)
        for move in moves:
            at = move.source.offset + first * move.source.stride
            part = read_elements(source(move.source.file), at, rows * move.width, move.source.dtype, move.source.file)
            column = (move.target.offset - base) // item
            band[:, column : column + move.width] = part.view(rows, move.width)
        _write(writer, base + first * stride, band)


def _bands(rows: int, stride: int) -> Iterable[tuple[int, int]]:
    step = max(1, BAND_BYTES // stride)
    return ((first, min(step, rows - first)) for first in range(0, rows, step))


def read_elements(descriptor: int, offset: int, elements: int, dtype: torch.dtype, file: Path) -> Tensor:
    values = torch.empty(elements, dtype=dtype)
    left = values.view(torch.uint8).numpy().data
    while left:
        done = os.preadv(descriptor, [left], offset)
        if not done:
            raise ValueError(f"{file} ends early: it changed while it was converted")
        left, offset = left[done:], offset + done
    return values


def _write(descriptor: int, offset: int, values: Tensor) -> None:
    left = values.contiguous().view(-1).view(torch.uint8).numpy().data
    while left:
        done = os.pwrite(descriptor, left, offset)
        left, offset = left[done:], offset + done
