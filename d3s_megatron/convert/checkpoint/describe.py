"""Plan and inspect: what would be done and what is there, from headers alone."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch

from d3s_megatron.convert.checkpoint.job import partial_folder
from d3s_megatron.convert.checkpoint.jobs import companions_of
from d3s_megatron.convert.checkpoint.moves import BAND_BYTES
from d3s_megatron.convert.checkpoint.sizes import size_text
from d3s_megatron.convert.checkpoint.torch_dist import DistCheckpoint, is_dist_checkpoint
from d3s_megatron.convert.checkpoint.torch_dist_layout import lay_out
from d3s_megatron.convert.hf_folder import INDEX, SINGLE, HFFolder
from d3s_megatron.convert.hf_writer import DEFAULT_SHARD_BYTES, plan_shards
from d3s_megatron.convert.names import expected_hf_names, hf_shape
from d3s_megatron.convert.safetensors_file import write_header
from d3s_megatron.convert.shape import ModelShape, read_shape

# The interpreter with torch in it, measured at 210 MB on Linux, with some air
BASE_BYTES = 300 * 10**6
# A worker holds a band, the part being written of it, and what the allocator keeps
BANDS_PER_WORKER = 8


@dataclass(frozen=True)
class Plan:
    """What a conversion will read, write and need."""

    shape: ModelShape
    direction: str  # import or export
    files: dict[str, int]  # bytes by file
    read_bytes: int
    peak_bytes: int
    free_disk: int
    free_memory: int

    @property
    def written_bytes(self) -> int:
        return sum(self.files.values())

    def check(self) -> None:
        """ValueError where the disk or the memory is too small."""
        if self.written_bytes > self.free_disk:
            raise ValueError(
                f"{size_text(self.written_bytes)} are to be written, the disk has {size_text(self.free_disk)} free: "
                "make room or choose another disk"
            )
        if self.peak_bytes > self.free_memory:
            raise ValueError(
                f"{size_text(self.peak_bytes)} of memory are needed, {size_text(self.free_memory)} are available: "
                "use fewer workers"
            )

    def __str__(self) -> str:
        sizes = sorted(self.files.items(), key=lambda item: (len(item[0]), item[0]))  # __2_0 before __10_0
        shown = [f"  {name}  {size_text(size)}" for name, size in sizes[:8]]
        shown += [f"  ... {len(sizes) - 8} more files"] if len(sizes) > 8 else []
        return "\n".join(
            [
                describe_shape(self.shape),
                f"{self.direction}: reads {size_text(self.read_bytes)}, writes {size_text(self.written_bytes)} in "
                f"{len(sizes)} file(s), peak memory about {size_text(self.peak_bytes)}",
                *shown,
                f"free: disk {size_text(self.free_disk)}, memory {size_text(self.free_memory)}",
            ]
        )


def plan_conversion(
    source: str | Path,
    out: str | Path | None = None,
    tp: int = 1,
    pp: int = 1,
    vpp: int = 1,
    vocab_multiple: int = 128,
    workers: int = 1,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    companions: str | Path | None = None,
) -> Plan:
    """Plan of an import (Hugging Face source) or an export (torch_dist source).

    A Hugging Face folder without weights is planned from its config.json. `out` says which disk counts.
    """
    source = Path(source)
    if is_dist_checkpoint(source):
        checkpoint = DistCheckpoint(source)
        shape = read_shape(companions_of(checkpoint, companions))
        checkpoint.blocks(shape)
        dtype = dtype or checkpoint.dtype
        files = {}
        for file, names in plan_shards(shape, dtype, max_shard_bytes).items():
            header, _ = write_header({name: (dtype, hf_shape(shape, name)) for name in names})
            files[file] = len(header) + _nbytes(shape, names, dtype)
        read, direction = _nbytes(shape, expected_hf_names(shape), checkpoint.dtype), "export"
    else:
        shape = read_shape(source)
        read, direction = _nbytes(shape, expected_hf_names(shape), shape.dtype), "import"
        if (source / INDEX).exists() or (source / SINGLE).exists():
            folder = HFFolder(source)
            folder.check(shape)
            read = sum(folder.entries[name].nbytes for name in expected_hf_names(shape))
        files = lay_out(shape, dtype or shape.dtype, tp, pp, vpp, vocab_multiple).sizes
    where = Path(out).absolute() if out else source.absolute()
    while not where.exists():
        where = where.parent
    peak = BASE_BYTES + workers * BANDS_PER_WORKER * BAND_BYTES
    free = shutil.disk_usage(where).free
    if out:  # what a stopped run has reserved already is not needed again
        free += sum(path.stat().st_blocks * 512 for path in partial_folder(Path(out)).glob("*"))
    return Plan(shape, direction, files, read, peak, free, psutil.virtual_memory().available)


def inspect(folder: str | Path, companions: str | Path | None = None) -> str:
    """What a checkpoint of either kind holds, as text."""
    if is_dist_checkpoint(folder):
        return _inspect_dist(DistCheckpoint(folder), companions)
    shape, hf = read_shape(folder), HFFolder(folder)
    hf.check(shape)
    dtypes = Counter(str(entry.dtype).removeprefix("torch.") for entry in hf.entries.values())
    kinds = ", ".join(f"{count} {name}" for name, count in dtypes.items())
    size = sum(entry.nbytes for entry in hf.entries.values())
    return (
        f"{describe_shape(shape)}\nHugging Face folder: {len(hf.entries)} tensors ({kinds}), {size_text(size)} in "
        f"{len(set(hf.file_of.values()))} file(s)"
    )


def _inspect_dist(checkpoint: DistCheckpoint, companions: str | Path | None) -> str:
    shape = read_shape(companions_of(checkpoint, companions))
    checkpoint.blocks(shape)
    qkv = next(
        s for key, s in checkpoint.stored.items() if key.endswith("linear_qkv.weight") and "optimizer" not in key
    )
    width = qkv.chunks[0].sizes[-2]
    tp = ((shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim) // width
    chunks = [chunk for stored in checkpoint.stored.values() for chunk in stored.chunks]
    common = checkpoint.common()
    step = next((common[key] for key in ("step", "iteration") if key in common), "not recorded")
    return "\n".join(
        [
            describe_shape(shape),
            f"torch_dist checkpoint: dtype {str(checkpoint.dtype).removeprefix('torch.')}, step {step}, "
            f"{'model and optimizer' if checkpoint.has_optimizer else 'model only'}, written by {tp} tensor-parallel "
            f"rank(s), vocabulary padded to {checkpoint.padded_vocab}",
            f"{len(checkpoint.stored)} keys, {len(chunks)} chunks, {size_text(sum(c.length for c in chunks))} in "
            f"{len({chunk.file for chunk in chunks})} file(s)",
        ]
    )


def describe_shape(shape: ModelShape) -> str:
    """Two lines about a model."""
    rope = f"rope theta {shape.rope_theta:g}" + (" with llama3 scaling" if shape.rope_scaling else "")
    return (
        f"{shape.family}: {shape.num_layers} layers, hidden {shape.hidden_size}, MLP {shape.ffn_size}, "
        f"{shape.num_heads} heads of {shape.head_dim}, {shape.num_kv_heads} KV heads, vocabulary {shape.vocab_size}\n"
        f"  {_nbytes(shape, expected_hf_names(shape), torch.uint8):,} parameters, "
        f"{'tied' if shape.tied else 'untied'} embeddings, {rope}, norm epsilon {shape.norm_eps:g}, "
        f"q/k/v bias {'yes' if shape.qkv_bias else 'no'}, q/k norm {'yes' if shape.qk_norm else 'no'}, "
        f"config dtype {str(shape.dtype).removeprefix('torch.')}"
    )


def _nbytes(shape: ModelShape, names: list[str], dtype: torch.dtype) -> int:
    return sum(torch.Size(hf_shape(shape, name)).numel() for name in names) * dtype.itemsize
