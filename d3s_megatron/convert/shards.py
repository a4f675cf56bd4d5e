"""Tensors in and out: one rank's shard from a Hugging Face source, shards merged, and split back by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from d3s_megatron.convert.names import OUTPUT, hf_shape, rule_of
from d3s_megatron.convert.pieces import pieces
from d3s_megatron.convert.shape import ModelShape

# What `read(hf_name)` returns: a Tensor or a safetensors slice, anything that gives a Tensor for [a:b] and [:, a:b]
Sliceable = Any


def shard_from_hf(
    shape: ModelShape,
    megatron_name: str,
    tp_rank: int,
    tp_size: int,
    padded_vocab: int,
    read: Callable[[str], Sliceable],
    dtype: torch.dtype | None = None,
) -> Tensor:
    """One rank's shard of a Megatron tensor, reading only the rows or columns it is made of.

    Args:
        megatron_name: global name in either spelling (see names.py).
        padded_vocab: global rows of embedding and head; rows beyond the vocabulary are zeros.
        read: from a Hugging Face name to something sliceable, such as `HFFolder.get_slice` or a dict's `__getitem__`.
        dtype: of the result; None keeps the stored one.

    Raises:
        ValueError: unknown name, a size that does not divide, or a source tensor of another shape.
    """
    parts: list[Tensor] = []
    for piece in pieces(shape, megatron_name, tp_rank, tp_size, padded_vocab):
        if piece.hf_name is None:
            like = torch.empty(0, dtype=parts[0].dtype) if parts else read(rule_of(shape, megatron_name).hf[0])[0:0]
            parts.append(torch.zeros(piece.rows, shape.hidden_size, dtype=like.dtype))
            continue
        source = read(piece.hf_name)
        _check_size(shape, piece.hf_name, source)
        parts.append(source[:, slice(*piece.columns)] if piece.columns else source[piece.start : piece.stop])
    shard = parts[0] if len(parts) == 1 else torch.cat(parts)
    return shard.to(dtype or shard.dtype).contiguous()


def merge_shards(shape: ModelShape, megatron_name: str, shards: list[Tensor]) -> Tensor:
    """The whole tensor from all tensor-parallel ranks' shards, in rank order, vocabulary padding cut off.

    Inverse of `shard_from_hf`; the result is what a single rank without padding would hold.
    """
    rule = rule_of(shape, megatron_name)
    if rule.layout == "replicated":
        whole = shards[0]
    elif rule.layout == "columns":
        whole = torch.cat(shards, dim=1)
    elif rule.layout == "gate_up":
        halves = [shard.chunk(2) for shard in shards]
        whole = torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
    else:
        whole = torch.cat(shards)
    if rule.layout == "vocab":
        whole = whole[: shape.vocab_size]
    expected = megatron_shape(shape, megatron_name)
    if tuple(whole.shape) != expected:
        raise ValueError(
            f"{megatron_name} merged from {len(shards)} shards has shape {tuple(whole.shape)}, expected {expected}: "
            "give one shard per tensor-parallel rank, in rank order"
        )
    return whole


def megatron_shape(shape: ModelShape, megatron_name: str) -> tuple[int, ...]:
    """Shape of the whole Megatron tensor, without vocabulary padding."""
    sizes = [hf_shape(shape, name) for name in rule_of(shape, megatron_name).hf]
    return (sum(size[0] for size in sizes), *sizes[0][1:])


def hf_tensors_from_full(shape: ModelShape, megatron_name: str, full: Tensor) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, tensor) pairs of a whole Megatron tensor, as from `merge_shards`.

    Nothing comes out for a tied model's `output_layer.weight`: it is the embedding, exported once (fault B02). The
    tensors are views of `full` where the layout allows it.
    """
    if shape.tied and megatron_name == OUTPUT:
        return
    expected = megatron_shape(shape, megatron_name)
    if tuple(full.shape) != expected:
        raise ValueError(f"{megatron_name} has shape {tuple(full.shape)}, expected {expected} (no vocabulary padding)")
    rule = rule_of(shape, megatron_name)
    if rule.layout == "gate_up":
        yield from zip(rule.hf, full.chunk(2), strict=True)
    elif rule.layout == "qkv":
        queries = shape.num_heads // shape.num_kv_heads * shape.head_dim
        groups = full.view(shape.num_kv_heads, queries + 2 * shape.head_dim, *full.shape[1:])
        parts = groups.split([queries, shape.head_dim, shape.head_dim], dim=1)
        for name, part in zip(rule.hf, parts, strict=True):
            yield name, part.reshape(-1, *full.shape[1:])
    else:
        yield rule.hf[0], full


def _check_size(shape: ModelShape, hf_name: str, source: Sliceable) -> None:
    found = tuple(source.get_shape() if hasattr(source, "get_shape") else source.shape)
    expected = hf_shape(shape, hf_name)
    if found != expected:
        raise ValueError(f"{hf_name} has shape {found}, config.json says {expected}: weights and config do not match")
