"""Import and export as jobs: what is read, what is written, and what stands beside the weights."""

from __future__ import annotations

from pathlib import Path

import torch

from d3s_megatron.convert.checkpoint.blocks import Block, hf_blocks, whole_tensor
from d3s_megatron.convert.checkpoint.job import Job
from d3s_megatron.convert.checkpoint.moves import plan
from d3s_megatron.convert.checkpoint.torch_dist import COMPANIONS, DistCheckpoint, is_dist_checkpoint
from d3s_megatron.convert.checkpoint.torch_dist_layout import lay_out
from d3s_megatron.convert.hf_folder import HFFolder
from d3s_megatron.convert.hf_writer import DEFAULT_SHARD_BYTES, copy_companions, plan_shards, write_index
from d3s_megatron.convert.names import hf_shape
from d3s_megatron.convert.safetensors_file import write_header
from d3s_megatron.convert.shape import ModelShape, read_shape


def import_job(
    source: str | Path,
    out: str | Path,
    tp: int = 1,
    pp: int = 1,
    vpp: int = 1,
    vocab_multiple: int = 128,
    dtype: torch.dtype | None = None,
) -> Job:
    """Hugging Face folder -> torch_dist checkpoint with the file layout of a TP x PP training job.

    `dtype` None keeps that of config.json. ValueError names whatever does not fit; nothing is written yet.
    """
    source = Path(source)
    if is_dist_checkpoint(source):
        raise ValueError(f"{source} is a Megatron checkpoint already: import takes a Hugging Face folder")
    shape, folder = read_shape(source), HFFolder(source)
    folder.check(shape)
    layout = lay_out(shape, dtype or shape.dtype, tp, pp, vpp, vocab_multiple)

    def finish(partial: Path) -> None:
        put_companions(source, partial, dtype or shape.dtype)
        layout.write_small_files(partial)

    tasks = plan(hf_blocks(folder, shape), layout.blocks)
    files = sorted(set(folder.file_of.values()))
    return Job(Path(out), layout.sizes, layout.frames, tasks, finish, files)


def export_job(
    source: str | Path,
    out: str | Path,
    companions: str | Path | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    dtype: torch.dtype | None = None,
) -> Job:
    """torch_dist checkpoint, imported or from training -> Hugging Face folder; optimizer state is left alone.

    `companions` is the folder with config.json and the tokenizer; None takes the one inside the checkpoint.
    `dtype` None keeps that of the checkpoint.
    """
    checkpoint = DistCheckpoint(source)
    beside = companions_of(checkpoint, companions)
    shape = read_shape(beside)
    dtype = dtype or checkpoint.dtype
    files = plan_shards(shape, dtype, max_shard_bytes)
    sizes, frames, targets = {}, [], []
    for file, names in files.items():
        header, entries = write_header({name: (dtype, hf_shape(shape, name)) for name in names})
        frames.append((file, 0, header))
        targets += [whole_tensor(entry, Path(file)) for entry in entries.values()]
        sizes[file] = len(header) + sum(entry.nbytes for entry in entries.values())
    total = sum(_nbytes(block) for block in targets)

    def finish(partial: Path) -> None:
        copy_companions(beside, partial, dtype)
        write_index(partial, files, total)

    sources = checkpoint.blocks(shape)
    return Job(Path(out), sizes, frames, plan(sources, targets), finish, sorted({block.file for block in sources}))


def put_companions(source: str | Path, checkpoint: Path, dtype: torch.dtype) -> None:
    """Keep a model folder's config, tokenizer and template files in a checkpoint: an export needs nothing else then."""
    (checkpoint / COMPANIONS).mkdir(exist_ok=True)
    copy_companions(source, checkpoint / COMPANIONS, dtype)


def companions_of(checkpoint: DistCheckpoint, given: str | Path | None = None) -> Path:
    """Folder with the model's config.json: the one given, or the one kept inside the checkpoint."""
    inside = checkpoint.folder / COMPANIONS
    if given is not None:
        return Path(given)
    if (inside / "config.json").is_file():
        return inside
    raise ValueError(f"{checkpoint.folder} has no {COMPANIONS}/config.json: name the model's folder with --hf FOLDER")


def blocks_of(folder: str | Path, companions: str | Path | None = None) -> tuple[ModelShape, list[Block]]:
    """Shape and blocks of a checkpoint of either kind."""
    if is_dist_checkpoint(folder):
        checkpoint = DistCheckpoint(folder)
        shape = read_shape(companions_of(checkpoint, companions))
        return shape, checkpoint.blocks(shape)
    shape, hf = read_shape(folder), HFFolder(folder)
    hf.check(shape)
    return shape, hf_blocks(hf, shape)


def _nbytes(block: Block) -> int:
    return block.elements * block.dtype.itemsize
