"""Write a Hugging Face folder tensor by tensor: sizes are known beforehand, so only one tensor is held at a time."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from d3s_megatron.convert.hf_folder import INDEX, SINGLE
from d3s_megatron.convert.names import expected_hf_names, hf_shape
from d3s_megatron.convert.safetensors_file import Entry, write_header
from d3s_megatron.convert.shape import ModelShape, read_config

# Files that describe a model without being its weights; everything else stays behind
COPIED_SUFFIXES = {".json", ".txt", ".model", ".jinja", ".tiktoken"}
COPIED_FOLDERS = ("additional_chat_templates",)
DEFAULT_SHARD_BYTES = 5_000_000_000  # what transformers and the hub use


def save_hf_folder(
    out: str | Path,
    shape: ModelShape,
    tensors: Iterable[tuple[str, Tensor]],
    source_folder: str | Path,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Write a folder that transformers loads; it appears under its name only when it is whole.

    Args:
        tensors: (Hugging Face name, tensor) pairs in any order, each name of `expected_hf_names` exactly once.
        source_folder: where config.json, generation config, tokenizer and chat template are copied from.
        dtype: of the files and of config.json; None takes the model's own.

    Raises:
        ValueError: `out` exists, or a tensor is unknown, repeated, missing or of the wrong shape.
    """
    out, dtype = Path(out), dtype or shape.dtype
    if out.exists():
        raise ValueError(f"{out} exists: remove it or choose another folder")
    beside = out.with_name(f".{out.name}.partial-{os.getpid()}")
    beside.mkdir(parents=True)
    try:
        copy_companions(source_folder, beside, dtype)
        _write_weights(beside, shape, tensors, dtype, max_shard_bytes)
        os.rename(beside, out)
    except BaseException:
        shutil.rmtree(beside)
        raise


def copy_companions(source_folder: str | Path, target: Path, dtype: torch.dtype) -> None:
    """Copy config, generation config, tokenizer and template files, and set the config's dtype to that of the files."""
    source = Path(source_folder)
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix in COPIED_SUFFIXES and not path.name.endswith(".index.json"):
            shutil.copyfile(path, target / path.name)
    for name in COPIED_FOLDERS:
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name)
    config = read_config(source)
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    name = str(dtype).removeprefix("torch.")
    if str(config.get(key)).removeprefix("torch.") != name:
        config[key] = name
        (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def plan_shards(shape: ModelShape, dtype: torch.dtype, max_shard_bytes: int) -> dict[str, list[str]]:
    """Tensor names by file, in the order of a forward pass; a file exceeds the limit only for a single tensor."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name in expected_hf_names(shape):
        nbytes = torch.Size(hf_shape(shape, name)).numel() * dtype.itemsize
        if groups[-1] and filled + nbytes > max_shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += nbytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": names for i, names in enumerate(groups, start=1)}


def write_index(folder: Path, files: dict[str, list[str]], total_bytes: int) -> None:
    """Write the index of a sharded folder; a single file needs none. `total_bytes` counts tensor bytes alone."""
    if SINGLE in files:
        return
    weight_map = {name: file for file, names in files.items() for name in names}
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write_weights(
    folder: Path, shape: ModelShape, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, max_shard_bytes: int
) -> None:
    files = plan_shards(shape, dtype, max_shard_bytes)
    place: dict[str, tuple[int, Entry]] = {}
    descriptors: list[int] = []
    try:
        for file, names in files.items():
            header, entries = write_header({name: (dtype, hf_shape(shape, name)) for name in names})
            descriptors.append(os.open(folder / file, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o644))
            os.pwrite(descriptors[-1], header, 0)
            place |= {name: (descriptors[-1], entry) for name, entry in entries.items()}
        total = sum(entry.nbytes for _, entry in place.values())
        for name, tensor in tensors:
            if name not in place:
                raise ValueError(f"tensor {name} is left over or came twice: it is not to be written")
            descriptor, entry = place.pop(name)
            if tuple(tensor.shape) != entry.shape:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, config.json says {entry.shape}")
            write_tensor(descriptor, entry.offset, tensor.to(dtype))
        if place:
            raise ValueError(f"{len(place)} tensors are missing, among them {next(iter(place))}")
        for descriptor in descriptors:
            os.fsync(descriptor)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    write_index(folder, files, total)


def write_tensor(descriptor: int, offset: int, tensor: Tensor) -> None:
    """Write a tensor's bytes at a byte offset of an open file."""
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    left = flat.numpy().data
    while left:
        done = os.pwrite(descriptor, left, offset)
        left, offset = left[done:], offset + done
