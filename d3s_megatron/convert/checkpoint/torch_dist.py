"""megatron-core's distributed checkpoints (torch_dist): what a folder holds, and the layout of one to be written.

The format is torch's distributed checkpoint: `.metadata` says for every key its whole size and where each chunk lies.
Layers share one key, with the layer as first dimension ("decoder.layers.mlp.linear_fc2.weight", [layers, ...]), or,
where a checkpoint was saved as non-homogeneous, have a key each; both are read, the first is written.
"""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from d3s_megatron.convert.checkpoint.archive import locate
from d3s_megatron.convert.checkpoint.blocks import Block, Patch, patch_blocks
from d3s_megatron.convert.names import EMBEDDING, LOCAL_NORMS, OUTPUT, rules
from d3s_megatron.convert.shape import ModelShape
from d3s_megatron.convert.shards import megatron_shape

METADATA, COMMON, BACKEND = ".metadata", "common.pt", "metadata.json"
# Where the config, tokenizer and template files of the model lie inside a checkpoint, for the way back
COMPANIONS = "hf"
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")


@dataclass(frozen=True)
class Chunk:
    """One stored rectangle of a key."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path
    offset: int
    length: int


@dataclass(frozen=True)
class Stored:
    """One key: its whole size, its dtype and its chunks."""

    key: str
    size: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


class DistCheckpoint:
    """A torch_dist folder; only its `.metadata` is read on opening.

    ValueError where the folder is no such checkpoint, or a file that `.metadata` names is missing or too short.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        _check_backend(self.folder)
        metadata = _read_metadata(self.folder / METADATA)
        self.stored = {
            key: self._stored(key, value, metadata)
            for key, value in metadata.state_dict_metadata.items()
            if isinstance(value, TensorStorageMetadata)
        }
        self.prefix = self._model_prefix()
        self._check_files()

    @property
    def padded_vocab(self) -> int:
        """Rows of the stored embedding."""
        return self.stored[self.prefix + EMBEDDING].size[0]

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the stored embedding, which is that of the model's matrices."""
        return self.stored[self.prefix + EMBEDDING].dtype

    @property
    def has_optimizer(self) -> bool:
        """Whether more than the model is in it."""
        return any(not self._is_model(key) for key in self.stored)

    def common(self) -> dict[str, Any]:
        """What common.pt holds beside the tensors; empty where it needs classes that are not plain data."""
        try:
            return torch.load(self.folder / COMMON, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, FileNotFoundError):
            return {}

    def blocks(self, shape: ModelShape) -> list[Block]:
        """The model's tensors as Hugging Face blocks; ValueError names what is missing, left over or ill-sized."""
        used: set[str] = set()
        found = [block for rule in rules(shape, "te") for block in self._rule_blocks(shape, rule.megatron, used)]
        left = sorted(key for key in self.stored if self._is_model(key) and key not in used)
        if left:
            raise ValueError(
                f"{self.folder} holds tensors that a {shape.family} model of {shape.num_layers} layers does not have: "
                + ", ".join(left[:5])
            )
        return found

    def _rule_blocks(self, shape: ModelShape, name: str, used: set[str]) -> Iterator[Block]:
        for key, layer, first_row, rows in self._keys(shape, name):
            used.add(key)
            stored = self.stored[key]
            whole = (rows, *megatron_shape(shape, name)[1:])
            if name in (EMBEDDING, OUTPUT):
                whole = (max(stored.size[0], shape.vocab_size), *whole[1:])
            expected = whole if layer is None else (shape.num_layers, *whole)
            if stored.size != expected:
                raise ValueError(
                    f"{key} has size {stored.size}, config.json says {expected}: they do not belong together"
                )
            for chunk in stored.chunks:
                if layer is not None and chunk.offsets[0] != layer:
                    if chunk.sizes[0] != 1:
                        raise ValueError(
                            f"{key} has a chunk of {chunk.sizes[0]} layers: resave it with one layer a chunk"
                        )
                    continue
                offsets, sizes = (x[layer is not None :] for x in (chunk.offsets, chunk.sizes))
                columns = (offsets[1], offsets[1] + sizes[1]) if len(sizes) > 1 else (0, 1)
                rows_here = (first_row + offsets[0], first_row + offsets[0] + sizes[0])
                data = self._locate(key, stored, chunk)
                patch = Patch(name, stored.dtype, rows_here, columns, chunk.file, data)
                yield from patch_blocks(shape, patch, max(self.padded_vocab, shape.vocab_size))

    def _keys(self, shape: ModelShape, name: str) -> Iterator[tuple[str, int | None, int, int]]:
        """(key, layer within the key or None, first row, rows) of the keys that hold one Megatron tensor."""
        rows = megatron_shape(shape, name)[0]
        match = _LAYER.match(name)
        if match and match[2] in LOCAL_NORMS:  # megatron-core saves under Transformer Engine's names; others may not
            local = f"decoder.layers.{match[1]}.{LOCAL_NORMS[match[2]]}"
            if (
                self.prefix + local in self.stored
                or f"{self.prefix}decoder.layers.{LOCAL_NORMS[match[2]]}" in self.stored
            ):
                name, match = local, _LAYER.match(local)
        key = self.prefix + name
        together = f"{self.prefix}decoder.layers.{match[2]}" if match else key
        if match and together in self.stored:
            yield together, int(match[1]), 0, rows
        elif key in self.stored:
            yield key, None, 0, rows
        elif key + "_w" in self.stored and key + "_v" in self.stored:  # gate and up under keys of their own
            yield key + "_w", None, 0, rows // 2
            yield key + "_v", None, rows // 2, rows // 2
        else:
            raise ValueError(f"{self.folder} has no tensor {together}: it does not hold this {shape.family} model")

    def _locate(self, key: str, stored: Stored, chunk: Chunk) -> int:
        descriptor = os.open(chunk.file, os.O_RDONLY)
        try:
            dtype, size, data = locate(descriptor, chunk.offset, chunk.length)
        finally:
            os.close(descriptor)
        if dtype != stored.dtype or _numel(size) != _numel(chunk.sizes):
            raise ValueError(f"{key} in {chunk.file} is {dtype} {size}, {METADATA} says {stored.dtype} {chunk.sizes}")
        return data

    def _stored(self, key: str, value: TensorStorageMetadata, metadata: Metadata) -> Stored:
        chunks = []
        for chunk in value.chunks:
            info = (metadata.storage_data or {}).get(MetadataIndex(key, chunk.offsets))
            if info is None:
                raise ValueError(f"{self.folder / METADATA} does not say where a part of {key} lies: it is damaged")
            file = self.folder / info.relative_path
            chunks.append(Chunk(tuple(chunk.offsets), tuple(chunk.sizes), file, info.offset, info.length))
        return Stored(key, tuple(value.size), value.properties.dtype, tuple(chunks))

    def _model_prefix(self) -> str:
        found = [
            key.removesuffix(EMBEDDING) for key in self.stored if key.endswith(EMBEDDING) and "optimizer" not in key
        ]
        if len(found) != 1:
            raise ValueError(f"{self.folder} holds {len(found)} tensors {EMBEDDING}: expected one model")
        return found[0]

    def _is_model(self, key: str) -> bool:
        return key.startswith(tuple(self.prefix + part for part in ("decoder.", "embedding.", "output_layer.")))

    def _check_files(self) -> None:
        ends: dict[Path, int] = {}
        for stored in self.stored.values():
            for chunk in stored.chunks:
                ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.offset + chunk.length)
        for file, end in ends.items():
            if not file.is_file():
                raise ValueError(f"{METADATA} names {file.name}, which is not in {self.folder}: fetch the missing file")
            if file.stat().st_size < end:
                raise ValueError(f"{file} has {file.stat().st_size} bytes, {METADATA} says {end}: it is truncated")


def is_dist_checkpoint(folder: str | Path) -> bool:
    """Whether a folder looks like a distributed checkpoint, whole or not."""
    return any((Path(folder) / name).is_file() for name in (METADATA, BACKEND))


def _check_backend(folder: Path) -> None:
    path = folder / BACKEND
    if not folder.is_dir():
        raise ValueError(f"no folder {folder}")
    if not path.is_file() or not (folder / METADATA).is_file():
        inside = sorted(str(p.parent.relative_to(folder)) for p in folder.glob(f"*/{BACKEND}"))
        hint = f"; there are checkpoints in {', '.join(inside)}: name one" if inside else ""
        raise ValueError(f"{folder} is no complete torch_dist checkpoint ({BACKEND} and {METADATA} are needed){hint}")
    backend = json.loads(path.read_text()).get("sharded_backend")
    if backend != "torch_dist":
        raise ValueError(f"{folder} was saved with backend {backend!r}: only 'torch_dist' is supported")


class _MetadataReader(pickle.Unpickler):
    """Reads `.metadata`; a name that is no plain description of a checkpoint is refused, as it could run code."""

    def find_class(self, module: str, name: str) -> Any:
        described = module.startswith("torch.distributed.checkpoint.") or (module, name) in _PLAIN
        if module == "torch" and isinstance(
            getattr(torch, name, None), torch.dtype | torch.layout | torch.memory_format
        ):
            described = True
        if name in ("MCoreMetadata", "MCoreSavePlan"):  # empty classes that older megatron-core versions left in it
            return type(name, (), {})
        if not described:
            raise ValueError(f"{METADATA} names {module}.{name}: it is no checkpoint description, refusing to load it")
        return super().find_class(module, name)


_PLAIN = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("collections", "defaultdict"),
    ("builtins", "set"),
    ("builtins", "list"),
    ("builtins", "dict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "Path"),
}


def _read_metadata(path: Path) -> Metadata:
    try:
        with open(path, "rb") as file:
            return _MetadataReader(file).load()
    except (pickle.UnpicklingError, EOFError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read ({error}): the checkpoint is damaged") from error


def _numel(size: tuple[int, ...]) -> int:
    return torch.Size(size).numel()
