"""Where rows and columns of Hugging Face tensors lie, in whichever format: the common coordinates of a conversion."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from d3s_megatron.convert.hf_folder import HFFolder
from d3s_megatron.convert.names import expected_hf_names
from d3s_megatron.convert.pieces import pieces
from d3s_megatron.convert.safetensors_file import Entry
from d3s_megatron.convert.shape import ModelShape


@dataclass(frozen=True)
class Block:
    """Rows and columns of one Hugging Face tensor, stored row by row; a vector is a tensor of one column."""

    tensor: str
    dtype: torch.dtype
    rows: tuple[int, int]
    columns: tuple[int, int]
    file: Path
    offset: int  # bytes, of the block's first element
    stride: int  # bytes, from one row to the next

    @property
    def elements(self) -> int:
        return (self.rows[1] - self.rows[0]) * (self.columns[1] - self.columns[0])


def whole_tensor(entry: Entry, file: Path) -> Block:
    """The block of a tensor that lies in a safetensors file in one piece."""
    rows, columns = entry.shape[0], entry.shape[1] if len(entry.shape) > 1 else 1
    stride = columns * entry.dtype.itemsize
    return Block(entry.name, entry.dtype, (0, rows), (0, columns), file, entry.offset, stride)


def hf_blocks(folder: HFFolder, shape: ModelShape) -> list[Block]:
    """The model's tensors in a Hugging Face folder that has passed `HFFolder.check`."""
    return [whole_tensor(folder.entries[name], folder.file_of[name]) for name in expected_hf_names(shape)]


@dataclass(frozen=True)
class Patch:
    """A rectangle of a whole Megatron tensor, stored contiguously: rows and columns count within that tensor."""

    megatron_name: str
    dtype: torch.dtype
    rows: tuple[int, int]
    columns: tuple[int, int]
    file: Path
    offset: int


def patch_blocks(shape: ModelShape, patch: Patch, padded_vocab: int) -> Iterator[Block]:
    """The Hugging Face blocks inside a Megatron patch; vocabulary padding has none."""
    stride = (patch.columns[1] - patch.columns[0]) * patch.dtype.itemsize
    at = 0
    for piece in pieces(shape, patch.megatron_name, padded_vocab=padded_vocab):
        low, high = max(at, patch.rows[0]), min(at + piece.rows, patch.rows[1])
        if low < high and piece.hf_name is not None:
            rows = (piece.start + low - at, piece.start + high - at)
            offset = patch.offset + (low - patch.rows[0]) * stride
            yield Block(piece.hf_name, patch.dtype, rows, patch.columns, patch.file, offset, stride)
        at += piece.rows
