"""The header of a safetensors file: where each tensor's bytes lie, checked against the file's real size.

Read by hand, in place of through the library, for two reasons: byte moves need the offsets, and a truncated download
should be named before anything is converted.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

# safetensors' names of the element types weights come in
TORCH_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
MAX_HEADER = 100_000_000  # bytes; the library's own limit, so that garbage is not read as a length


@dataclass(frozen=True)
class Entry:
    """One tensor in a file: `offset` and `nbytes` count from the start of the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_header(path: str | Path) -> dict[str, Entry]:
    """Entries by name; ValueError names the file where it is truncated, too long or no safetensors file."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= MAX_HEADER or 8 + length > size:
            raise ValueError(f"{path} ({size} bytes) is truncated or no safetensors file: fetch it again")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise ValueError(f"{path} has a damaged safetensors header ({error}): fetch it again") from error
    entries = {name: _entry(path, name, item, 8 + length) for name, item in header.items() if name != "__metadata__"}
    end = max((entry.offset + entry.nbytes for entry in entries.values()), default=8 + length)
    if end != size:
        raise ValueError(f"{path} has {size} bytes, its header says {end}: the file is damaged, fetch it again")
    return entries


def _entry(path: str | Path, name: str, item: Mapping, base: int) -> Entry:
    if item["dtype"] not in TORCH_DTYPES:
        raise ValueError(
            f"{name} in {path} has dtype {item['dtype']}: supported are {', '.join(TORCH_DTYPES)}; "
            "save a dequantised copy"
        )
    dtype, shape = TORCH_DTYPES[item["dtype"]], tuple(item["shape"])
    start, stop = item["data_offsets"]
    if stop - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name} in {path} has {stop - start} bytes for shape {shape}: fetch the file again")
    return Entry(name, dtype, shape, base + start, stop - start)


def write_header(sizes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> tuple[bytes, dict[str, Entry]]:
    """Header bytes of a file that holds these tensors one after the other, and where each one lies."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers asks for this entry
    at, spans = 0, {}
    for name, (dtype, shape) in sizes.items():
        nbytes = math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + nbytes]}
        spans[name] = (at, nbytes)
        at += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts aligned
    base = 8 + len(text)
    entries = {name: Entry(name, *sizes[name], base + start, nbytes) for name, (start, nbytes) in spans.items()}
    return struct.pack("<Q", len(text)) + text, entries
