"""Lay out a torch_dist checkpoint before a byte of it is written: files, frames, chunks, and its `.metadata`."""

from __future__ import annotations

import io
import json
import pickle
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from d3s_megatron.convert.checkpoint.archive import frame
from d3s_megatron.convert.checkpoint.blocks import Block, Patch, patch_blocks
from d3s_megatron.convert.checkpoint.torch_dist import BACKEND, COMMON, METADATA
from d3s_megatron.convert.names import Rule, rules
from d3s_megatron.convert.parallel import check_tp, padded_vocab_size, stage_layers
from d3s_megatron.convert.shape import ModelShape
from d3s_megatron.convert.shards import megatron_shape

# megatron-core's linear layers keep an (empty) extra state, and its loader asks for it
_EXTRA_STATE = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")


@dataclass
class DistLayout:
    """Every byte of a checkpoint to be written."""

    sizes: dict[str, int] = field(default_factory=dict)
    frames: list[tuple[str, int, bytes]] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    tensors: dict[str, TensorStorageMetadata] = field(default_factory=dict)
    objects: dict[str, BytesStorageMetadata] = field(default_factory=dict)
    storage: dict[MetadataIndex, _StorageInfo] = field(default_factory=dict)
    common: dict[str, Any] = field(default_factory=dict)

    def write_small_files(self, folder: Path) -> None:
        """common.pt, `.metadata` and, last, the file that says the checkpoint is complete."""
        torch.save(self.common, folder / COMMON)
        metadata = Metadata(
            state_dict_metadata={**self.tensors, **self.objects},
            storage_data=self.storage,
            storage_meta=StorageMeta(checkpoint_id=None, save_id=str(uuid.uuid4())),
        )
        with open(folder / METADATA, "wb") as file:
            pickle.dump(metadata, file)
        backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        backend |= {"common_backend": "torch", "common_backend_version": 1}
        (folder / BACKEND).write_text(json.dumps(backend))

    def add_tensor(self, file: str, key: str, whole: tuple[int, ...], offsets: tuple[int, ...], size: tuple[int, ...],
                   dtype: torch.dtype) -> int:  # fmt: skip
        """Append a chunk to a file; returns the byte offset of its data."""
        before, after = _frame(dtype, size)
        at, nbytes = self.sizes.get(file, 0), torch.Size(size).numel() * dtype.itemsize
        data = at + len(before)
        self.frames += [(file, at, before), (file, data + nbytes, after)]
        self.sizes[file] = data + nbytes + len(after)
        stored = self.tensors.setdefault(
            key, TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(whole), [])
        )
        stored.chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(size)))
        info = _StorageInfo(file, at, self.sizes[file] - at)
        self.storage[MetadataIndex(key, torch.Size(offsets))] = info
        return data

    def add_object(self, file: str, key: str, data: bytes) -> None:
        """Append an object that is no tensor."""
        at = self.sizes.get(file, 0)
        self.frames.append((file, at, data))
        self.sizes[file] = at + len(data)
        self.objects[key] = BytesStorageMetadata()
        self.storage[MetadataIndex(key)] = _StorageInfo(file, at, len(data))


@cache
def _frame(dtype: torch.dtype, size: tuple[int, ...]) -> tuple[bytes, bytes]:
    return frame(dtype, size)


def lay_out(
    shape: ModelShape, dtype: torch.dtype, tp: int = 1, pp: int = 1, vpp: int = 1, vocab_multiple: int = 128
) -> DistLayout:
    """Layout with one file per rank of a TP x PP training job, so that each rank of it reads its own file.

    Any other layout can load it too. ValueError where the model does not divide.
    """
    check_tp(shape, tp)
    layout = DistLayout()
    padded = padded_vocab_size(shape.vocab_size, vocab_multiple, tp)
    stage_of = {
        layer: stage for stage, layers in enumerate(stage_layers(shape.num_layers, pp, vpp)) for layer in layers
    }
    for rule in rules(shape, "te"):
        layer = int(rule.megatron.split(".")[2]) if rule.megatron.startswith("decoder.layers.") else None
        stage = stage_of[layer] if layer is not None else 0 if rule.megatron.startswith("embedding") else pp - 1
        key = rule.megatron
        first: tuple[int, ...] = ()
        whole_first: tuple[int, ...] = ()
        if layer is not None:
            key = "decoder.layers." + rule.megatron.split(".", 3)[3]
            first, whole_first = (layer,), (shape.num_layers,)
        whole = megatron_shape(shape, rule.megatron)
        if rule.layout == "vocab":
            whole = (padded, *whole[1:])
        for rank, offsets, size in _parts(rule, whole, tp):
            file = f"__{stage * tp + rank}_0.distcp"
            ones = (1,) * len(first)
            data = layout.add_tensor(file, key, whole_first + whole, first + offsets, ones + size, dtype)
            columns = (offsets[1], offsets[1] + size[1]) if len(size) > 1 else (0, 1)
            patch = Patch(rule.megatron, dtype, (offsets[0], offsets[0] + size[0]), columns, Path(file), data)
            layout.blocks += patch_blocks(shape, patch, padded)
    nothing = io.BytesIO()
    torch.save([None], nothing)
    for layer, stage in sorted(stage_of.items()):
        for module in _EXTRA_STATE:
            key = f"decoder.layers.{module}._extra_state/shard_{layer}_{shape.num_layers}"
            layout.add_object(f"__{stage * tp}_0.distcp", key, nothing.getvalue())
    described = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "padded_vocab_size": padded}
    layout.common = {"step": 0, "content_metadata": described}
    return layout


def _parts(rule: Rule, whole: tuple[int, ...], tp: int) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """(rank, offsets, size) of every stored rectangle of a whole tensor."""
    zeros = (0,) * (len(whole) - 1)
    if rule.layout == "replicated":
        yield 0, (0, *zeros), whole
        return
    for rank in range(tp):
        if rule.layout == "columns":
            width = whole[1] // tp
            yield rank, (0, rank * width), (whole[0], width)
            continue
        halves = 2 if rule.layout == "gate_up" else 1
        rows = whole[0] // halves // tp
        for half in range(halves):
            yield rank, (half * (whole[0] // halves) + rank * rows, *zeros), (rows, *whole[1:])
