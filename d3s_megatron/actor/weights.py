"""Weights in and out of the shards: a Hugging Face folder to this rank's parameters, and the parameters to a stream
of (Hugging Face name, full tensor).

The names are mapped in convert/; here is only which rank holds what. A rank reads its own slices of the folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.nn import Parameter

from d3s_megatron.actor.config import ActorConfig
from d3s_megatron.actor.model import ActorModel
from d3s_megatron.actor.parallel import Layout
from d3s_megatron.convert import (
    HFFolder,
    ModelShape,
    global_name,
    hf_tensors_from_full,
    merge_shards,
    padded_vocab_size,
    shard_from_hf,
)

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


def named_parameters(chunks: Sequence[ActorModel]) -> Iterator[tuple[str, Parameter]]:
    """(name in the whole model, parameter) of everything this rank holds."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            yield global_name(name, chunk.first_layer), parameter


def load_weights(
    chunks: Sequence[ActorModel], folder: HFFolder, shape: ModelShape, config: ActorConfig, layout: Layout
) -> None:
    """Fills this rank's parameters from the folder; ValueError names a tensor that is missing or of another shape."""
    padded = padded_vocab_size(shape.vocab_size, config.vocab_padding_multiple, layout.tp_size)
    with torch.no_grad():
        for name, parameter in named_parameters(chunks):
            shard = shard_from_hf(shape, name, layout.tp_rank, layout.tp_size, padded, folder.get_slice)
            if shard.shape != parameter.shape:
                raise ValueError(
                    f"{name}: the folder gives {tuple(shard.shape)}, the model wants {tuple(parameter.shape)}; "
                    "is its config.json the one of these weights?"
                )
            parameter.copy_(shard)


def weight_stream(
    chunks: Sequence[ActorModel],
    shape: ModelShape,
    layout: Layout,
    read: Callable[[Parameter], Tensor] = Tensor.detach,
    bucket_bytes: int = 256 * 2**20,
) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, full tensor) of the whole model, on every rank, in buckets of bounded size.

    A collective: every rank must draw it to its end. A tensor larger than `bucket_bytes` is a bucket of its own.
    `read` says what is streamed of a parameter: its values, or for instance its gradient.
    """
    own = [
        (name, read(parameter))
        for name, parameter in named_parameters(chunks)
        if not (name == OUTPUT and shape.tied)  # the last stage's copy of a tied embedding
    ]
    headers = [[(name, tuple(tensor.shape)) for name, tensor in own]]
    if layout.pp_size > 1:
        headers *= layout.pp_size
        dist.all_gather_object(headers, headers[0], group=parallel_state.get_pipeline_model_parallel_group())
    dtype = own[0][1].dtype
    for stage, header in enumerate(headers):
        for bucket in _buckets(header, bucket_bytes, dtype.itemsize * layout.tp_size):
            mine = [tensor for _, tensor in own[bucket.start : bucket.stop]] if stage == layout.pp_rank else None
            yield from _gather_bucket(header[bucket.start : bucket.stop], mine, stage, dtype, shape, layout)


def replica_spread(chunks: Sequence[ActorModel], shape: ModelShape, layout: Layout) -> float:
    """Largest difference between the copies that several ranks hold of one parameter; a collective.

    Copies: every parameter over the data- and context-parallel ranks, what tensor parallelism does not cut over its
    ranks, and a tied embedding on first and last stage (fault E10).
    """
    spread = torch.zeros(1, device=layout.device)
    for name, parameter in named_parameters(chunks):
        groups = [parallel_state.get_data_parallel_group(with_context_parallel=True)]
        if not getattr(parameter, "tensor_model_parallel", False):
            groups.append(parallel_state.get_tensor_model_parallel_group())
        if shape.tied and layout.pp_size > 1 and name in (EMBEDDING, OUTPUT):
            groups.append(parallel_state.get_embedding_group())
        for group in groups:
            ends = torch.stack([parameter.detach().float(), -parameter.detach().float()])
            dist.all_reduce(ends, dist.ReduceOp.MAX, group=group)
            spread = torch.maximum(spread, (ends[0] + ends[1]).max())
    dist.all_reduce(spread, dist.ReduceOp.MAX)
    return float(spread)


def _buckets(header: list[tuple[str, tuple[int, ...]]], bucket_bytes: int, width: int) -> Iterator[range]:
    start, size = 0, 0
    for i, (_, dims) in enumerate(header):
        bytes_here = width * torch.Size(dims).numel()
        if i > start and size + bytes_here > bucket_bytes:
            yield range(start, i)
            start, size = i, 0
        size += bytes_here
    yield range(start, len(header))


def _gather_bucket(header, mine, stage, dtype, shape, layout) -> Iterator[tuple[str, Tensor]]:
    """One flat all-gather over TP on the stage that holds the bucket, one broadcast to the other stages."""
    sizes = [torch.Size(dims).numel() for _, dims in header]
    flat = torch.empty(layout.tp_size, sum(sizes), dtype=dtype, device=layout.device)
    if mine is not None:
        torch.cat([tensor.reshape(-1) for tensor in mine], out=flat[layout.tp_rank])
        if layout.tp_size > 1:
            group, shard = parallel_state.get_tensor_model_parallel_group(), flat[layout.tp_rank].clone()
            dist.all_gather(list(flat.unbind(0)), shard, group=group)
    if layout.pp_size > 1:
        group = parallel_state.get_pipeline_model_parallel_group()
        dist.broadcast(flat, src=dist.get_process_group_ranks(group)[stage], group=group)
    start = 0
    for (name, dims), size in zip(header, sizes, strict=True):
        shards = [part.view(dims) for part in flat[:, start : start + size]]
        start += size
        yield from hf_tensors_from_full(shape, name, merge_shards(shape, name, shards))
