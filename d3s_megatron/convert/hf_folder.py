"""A Hugging Face folder as it lies on disk: which file holds which tensor, checked before anything is read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from d3s_megatron.convert.names import HF_EMBEDDING, HF_HEAD, expected_hf_names, hf_shape
from d3s_megatron.convert.safetensors_file import Entry, read_header
from d3s_megatron.convert.shape import ModelShape

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Buffers that old Llama folders carry; every model computes them from rope_theta
COMPUTED = re.compile(r"^model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq$")
COMPARE_ROWS = 4096  # rows of embedding and head held at once while they are compared


class HFFolder:
    """Safetensors weights of a folder, one file or sharded; tensors are read on demand and in slices.

    Raises ValueError on opening where a shard is missing or truncated, or the index and the shards disagree.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.entries: dict[str, Entry] = {}
        self.file_of: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        index = self._read_index()
        for file in sorted({self.folder / name for name in index.values()} if index else {self._single_file()}):
            if not file.is_file():
                raise ValueError(f"{INDEX} names {file.name}, which is not in {self.folder}: fetch the missing shard")
            for name, entry in read_header(file).items():
                if index and index.get(name) != file.name:
                    raise ValueError(
                        f"{name} lies in {file.name}, but {INDEX} has it in {index.get(name, 'no file')}: "
                        "index and shards come from different saves"
                    )
                self.entries[name], self.file_of[name] = entry, file
        absent = sorted(set(index) - set(self.entries))
        if absent:
            raise ValueError(f"{INDEX} lists tensors that no shard holds: {_some(absent)}")

    def names(self) -> list[str]:
        """Tensor names, sorted."""
        return sorted(self.entries)

    def dtype(self, name: str) -> torch.dtype:
        """Stored element type of one tensor."""
        return self._entry(name).dtype

    def get_slice(self, name: str) -> Any:
        """A slice-able view of one tensor: `[a:b]` and `[:, a:b]` read that part alone into a new Tensor."""
        self._entry(name)
        file = self.file_of[name]
        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt")
        return self._open[file].get_slice(name)

    def tensors(self, shape: ModelShape) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of every weight of the model, read one at a time."""
        return ((name, self.get_slice(name)[:]) for name in expected_hf_names(shape))

    def check(self, shape: ModelShape) -> None:
        """ValueError naming every tensor that is missing, left over or of the wrong shape for this model.

        A tied folder may hold lm_head.weight where it equals the embedding bit for bit.
        """
        expected = set(expected_hf_names(shape))
        found = {name for name in self.entries if not COMPUTED.match(name)}
        if shape.tied and HF_HEAD in found and HF_EMBEDDING in found:
            self._check_tied_head()
            found.discard(HF_HEAD)
        missing, left = sorted(expected - found), sorted(found - expected)
        if missing or left:
            raise ValueError(
                f"{self.folder} does not hold a {shape.family} model of {shape.num_layers} layers: "
                f"missing {_some(missing)}; left over {_some(left)}"
            )
        for name in expected:
            if self.entries[name].shape != hf_shape(shape, name):
                raise ValueError(
                    f"{name} has shape {self.entries[name].shape}, config.json says {hf_shape(shape, name)}: "
                    "weights and config do not match"
                )

    def _check_tied_head(self) -> None:
        head, embedding = self.get_slice(HF_HEAD), self.get_slice(HF_EMBEDDING)
        same = self.entries[HF_HEAD].shape == self.entries[HF_EMBEDDING].shape
        rows = self.entries[HF_HEAD].shape[0]
        starts = range(0, rows, COMPARE_ROWS)
        if not same or not all(
            torch.equal(head[i : i + COMPARE_ROWS], embedding[i : i + COMPARE_ROWS]) for i in starts
        ):
            raise ValueError(
                f"tie_word_embeddings is true, but {HF_HEAD} differs from {HF_EMBEDDING}: set it to false in "
                "config.json to keep the head, or remove the head"
            )

    def _entry(self, name: str) -> Entry:
        if name not in self.entries:
            raise ValueError(f"{self.folder} has no tensor {name}")
        return self.entries[name]

    def _read_index(self) -> dict[str, str]:
        path = self.folder / INDEX
        if not path.is_file():
            return {}
        try:
            return dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no index with a weight_map ({error!r}): fetch it again") from error

    def _single_file(self) -> Path:
        path = self.folder / SINGLE
        if path.is_file():
            return path
        if not self.folder.is_dir():
            raise ValueError(f"no folder {self.folder}")
        if any(self.folder.glob("*.bin")):
            raise ValueError(
                f"{self.folder} has pickled .bin weights, which can run code when loaded: save them as safetensors "
                "(transformers' save_pretrained does) and convert that folder"
            )
        raise ValueError(f"{self.folder} has neither {SINGLE} nor {INDEX}: give a folder with safetensors weights")


def _some(names: list[str], limit: int = 5) -> str:
    shown = ", ".join(names[:limit]) or "nothing"
    return f"{shown} and {len(names) - limit} more" if len(names) > limit else shown
