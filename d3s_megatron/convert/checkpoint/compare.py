"""Verify: two checkpoints of either kind, tensor by tensor and bit for bit, by a digest that no sharding changes."""

from __future__ import annotations

import hashlib
import threading
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from d3s_megatron.convert.checkpoint.blocks import Block
from d3s_megatron.convert.checkpoint.disk import Reader
from d3s_megatron.convert.checkpoint.moves import BAND_BYTES, overlap
from d3s_megatron.convert.names import expected_hf_names, hf_shape
from d3s_megatron.convert.shape import ModelShape


@dataclass(frozen=True)
class Digest:
    """One logical tensor: its dtype, its shape and the BLAKE2b of its bytes in row order."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    hexdigest: str


def digests(shape: ModelShape, blocks: Iterable[Block], workers: int = 1) -> dict[str, Digest]:
    """Digest of every Hugging Face tensor of a checkpoint, read in bands of bounded size."""
    by_tensor: dict[str, list[Block]] = defaultdict(list)
    for block in blocks:
        by_tensor[block.tensor].append(block)

    mine, readers = threading.local(), []

    def start() -> None:
        mine.reader = Reader()
        readers.append(mine.reader)

    def one(name: str) -> Digest:
        return _digest(name, hf_shape(shape, name), by_tensor[name], mine.reader)

    names = expected_hf_names(shape)
    try:
        with ThreadPoolExecutor(workers, initializer=start) as pool:
            return dict(zip(names, pool.map(one, names), strict=True))
    finally:
        for reader in readers:
            reader.close()


def differences(ours: dict[str, Digest], theirs: dict[str, Digest]) -> list[str]:
    """One line for every tensor that differs in presence, shape, dtype or bits; empty where all are equal."""
    lines = [f"{name}: only in the first" for name in ours.keys() - theirs.keys()]
    lines += [f"{name}: only in the second" for name in theirs.keys() - ours.keys()]
    for name in ours.keys() & theirs.keys():
        a, b = ours[name], theirs[name]
        if a.shape != b.shape:
            lines.append(f"{name}: shape {a.shape} and {b.shape}")
        elif a.dtype != b.dtype:
            lines.append(f"{name}: dtype {a.dtype} and {b.dtype}")
        elif a.hexdigest != b.hexdigest:
            lines.append(f"{name}: values differ")
    return sorted(lines)


def _digest(name: str, size: tuple[int, ...], blocks: list[Block], reader: Reader) -> Digest:
    if not blocks:
        raise ValueError(f"{name} is missing")
    rows, columns, dtype = size[0], size[1] if len(size) > 1 else 1, blocks[0].dtype
    if sum(block.elements for block in blocks) != rows * columns:
        raise ValueError(f"a part of {name} is missing or stored twice")
    hashed, item = hashlib.blake2b(digest_size=32), dtype.itemsize
    step = max(1, BAND_BYTES // (columns * item))
    band = np.empty((min(step, rows), columns * item), np.uint8)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        here = Block(name, dtype, (first, first + count), (0, columns), blocks[0].file, 0, 0)
        for block in blocks:
            move = overlap(block, here)
            if move is None:
                continue
            row, column = max(block.rows[0], first) - first, block.columns[0] * item
            # A block narrower than the tensor is stored without gaps, so its rows are one run of bytes.
            part = reader.view(block.file, move.source.offset, move.rows * move.width * item)
            band[row : row + move.rows, column : column + move.width * item] = part.reshape(move.rows, -1)
        hashed.update(band[:count].data)
    return Digest(dtype, size, hashed.hexdigest())
