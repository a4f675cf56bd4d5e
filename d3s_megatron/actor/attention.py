"""Attention over packed rows for megatron-core without Transformer Engine.

A packed row holds samples one after the other, [T, 1, ...]. Attention must not see across their borders and positions
restart at 0. megatron-core's own CPU attention knows no packing; here the samples of a row are laid out as small
rectangles (`blocks`), torch's scaled_dot_product_attention runs on each, and the result goes back into the row. Samples
share a rectangle only if their lengths are within a factor of two, so at most half of it is padding.

Samples of one prompt may share its tokens (TokenBatch.prefix). A small family of them, prompt and responses, is one
rectangle with a mask; in a larger one every response is laid out behind a copy of its prompt's rows.

Under context parallelism a rank has queries of two chunks of every sample (context.py) and takes the keys and values
of all ranks; a late chunk's mask is a tensor, chunk x keys, which the layers share. Transformer Engine passes keys
around in place of gathering them, and needs no such mask: for very long samples it is the better of the two.

Shapes: T tokens of the row, of which this rank has T_own (all without context parallelism), h heads of this rank,
g key/value groups of this rank, d head size, m samples of a rectangle.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from d3s_megatron.actor.context import own_positions, parts_of, places

FAMILY = 128  # tokens of a prompt and all its responses: attention over so few takes less time than a call for each


@dataclass(frozen=True)
class Block:
    """Samples of similar length as one rectangle; index entries beyond a sample's end point at some other row."""

    queries: Tensor  # [m, Lq] rows of this rank
    keys: Tensor  # [m, Lk] rows of all ranks, end to end; those of this rank where there is no context parallelism
    bias: Tensor | None = None  # [m or 1, 1, Lq, Lk] 0 where a query sees a key, else -inf; None: those up to its own
    behind: Tensor | None = None  # [m or 1] tokens of its sample before the first query, where there are any

    def to(self, device: torch.device) -> Block:
        """The block on a device, rectangles that are one staying one."""
        queries = self.queries.to(device)
        keys = queries if self.keys is self.queries else self.keys.to(device)
        bias, behind = (None if t is None else t.to(device) for t in (self.bias, self.behind))
        return Block(queries, keys, bias, behind)

    def with_bias(self, dtype: torch.dtype) -> Block:
        """Query i sees keys 0 to behind + i, which hides what pads the rectangles of shorter samples as well."""
        if self.behind is None:
            return self
        query, key = (torch.arange(t.shape[1], device=t.device) for t in (self.queries, self.keys))
        hidden = key > self.behind[:, None, None] + query[:, None]
        bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
        return replace(self, bias=bias[:, None])


def _no_rows() -> Tensor:
    return torch.zeros(0, dtype=torch.int64)


@dataclass
class PackedRow(PackedSeqParams):
    """Borders of a packed row as megatron-core hands them from layer to layer, made by `pack_row`."""

    position_ids: Tensor = field(default_factory=_no_rows)  # [T_own]
    blocks: tuple[Block, ...] = ()
    source: Tensor = field(default_factory=_no_rows)  # [T_own] where each row stands in the rectangles, laid end to end
    shares_prompts: bool = False  # a segment continues another one

    def with_biases(self, dtype: torch.dtype) -> PackedRow:
        """The row for one forward pass: layers share its biases, which are gone when its backward pass is done."""
        if all(block.behind is None for block in self.blocks):
            return self
        return replace(self, blocks=tuple(block.with_bias(dtype) for block in self.blocks))


def pack_row(
    cu_seqlens: Tensor,
    position_ids: Tensor,
    device: torch.device,
    prefix: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    cp_rank: int = 0,
    cp_size: int = 1,
) -> PackedRow:
    """Borders of the segments [n + 1] and positions [T] of a whole row to what a rank's layers need, on `device`.

    Args:
        prefix: [n] the segment that each one continues, -1 for none (see TokenBatch).
        dtype: that of queries and keys.
        cp_rank, cp_size: which share of the row the rank holds (context.py); in shares, no segment continues another.
    """
    if cp_size == 1:
        blocks, source = _blocks(cu_seqlens, prefix, dtype)
    else:
        assert prefix is None or (prefix < 0).all(), "prompts are not shared under context parallelism"
        blocks, source = _blocks_of_share(cu_seqlens, cp_rank, cp_size)
    longest = int(cu_seqlens.diff().max())
    return PackedRow(
        # Not "thd": megatron-core then leaves [T, 1, ...] and the rotary embedding below alone.
        qkv_format="sbhd",
        cu_seqlens_q=cu_seqlens.to(device),
        cu_seqlens_kv=cu_seqlens.to(device),
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        position_ids=position_ids[own_positions(cu_seqlens, cp_rank, cp_size)].to(device),
        blocks=tuple(block.to(device) for block in blocks),
        source=source.to(device),
        shares_prompts=prefix is not None and bool((prefix >= 0).any()),
    )


def _blocks(cu_seqlens: Tensor, prefix: Tensor | None, dtype: torch.dtype) -> tuple[list[Block], Tensor]:
    """The rectangles of a whole row, and its `source`."""
    num_rows = int(cu_seqlens[-1])
    starts, lengths = cu_seqlens[:-1], cu_seqlens.diff()
    prefix = torch.full_like(starts, -1) if prefix is None else prefix
    # A family is a segment and all that continue it, side by side in the row. Small ones are a rectangle each; of the
    # others attention sees every segment behind the one that it continues, and that one with the first of them.
    root = torch.where(prefix >= 0, prefix, torch.arange(len(prefix)))
    family = (prefix < 0).cumsum(0) - 1
    num_tokens = torch.bincount(family, lengths.double()).long()[family]
    is_small = (num_tokens <= FAMILY) & (torch.bincount(family)[family] > 1)
    is_seen = ~is_small
    is_seen[prefix[prefix >= 0]] = False

    blocks, laid = [], 0
    source = torch.full((num_rows,), torch.iinfo(torch.int64).max)

    def add(first: Tensor, num_first: Tensor, second: Tensor, num_second: Tensor, segment: Tensor | None) -> None:
        nonlocal laid
        whole = num_first + num_second
        longest_first = whole.argsort(descending=True, stable=True)
        for group in _similar(whole[longest_first].tolist()):
            members = longest_first[group]  # [m]
            offsets = torch.arange(int(whole[members[0]]))[None, :]
            split = num_first[members][:, None]
            start = torch.where(offsets < split, first[members][:, None], second[members][:, None] - split)
            valid = offsets < whole[members][:, None]
            keys = (start + offsets).masked_fill(~valid, 0)
            # Of the places of a shared row the first one is read.
            source.scatter_reduce_(0, keys[valid], laid + valid.flatten().nonzero().flatten(), "amin")
            laid += valid.numel()
            blocks.append(Block(keys, keys, None if segment is None else _family_bias(segment[keys], valid, dtype)))

    seen = is_seen.nonzero().flatten()
    if len(seen):
        add(
            starts[root[seen]],
            torch.where(prefix[seen] >= 0, lengths[root[seen]], 0),
            starts[seen],
            lengths[seen],
            None,
        )
    small = (is_small & (prefix < 0)).nonzero().flatten()
    if len(small):
        # Which segment a row belongs to, the first of each family being 0.
        segment = (torch.arange(len(prefix)) - root).repeat_interleave(lengths)
        add(starts[small], num_tokens[small], starts[small], torch.zeros_like(small), segment)
    return blocks, source


def _family_bias(segment: Tensor, valid: Tensor, dtype: torch.dtype) -> Tensor:
    """[m, 1, L, L] for families: a token sees those before it of its own segment and of the first; segments [m, L]."""
    sees = (segment[:, :, None] == segment[:, None, :]) | (segment[:, None, :] == 0)
    sees &= torch.ones(sees.shape[1:], dtype=torch.bool).tril()
    sees |= ~valid[:, :, None]  # padding must see something; nobody reads it
    return torch.zeros(sees.shape, dtype=dtype).masked_fill(~sees, -torch.inf)[:, None]


def _blocks_of_share(cu_seqlens: Tensor, rank: int, size: int) -> tuple[list[Block], Tensor]:
    """The rectangles of a rank's share of a row, a chunk's queries with all keys up to its end, and its `source`."""
    starts, lengths = cu_seqlens[:-1], cu_seqlens.diff()
    place = places(cu_seqlens, size)
    longest_first = lengths.argsort(descending=True, stable=True)
    blocks, laid, source = [], 0, torch.empty(len(place) // size, dtype=torch.int64)
    for group in _similar(lengths[longest_first].tolist()):
        members = longest_first[group]
        first, chunk = starts[members], lengths[members] // (2 * size)  # [m] each
        for order, part in enumerate(parts_of(rank, size)):
            queries, real = _runs(first // size + order * chunk, chunk)
            keys, _ = _runs(first, (part + 1) * chunk)
            source[queries[real]] = laid + real.flatten().nonzero().flatten()
            laid += real.numel()
            behind = part * chunk
            if (chunk == chunk[0]).all():
                behind = behind[:1]  # one bias for all
            blocks.append(Block(queries, place[keys], behind=behind if part else None))
    return blocks, source


def _runs(starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Indices [m, L] of runs of rows, 0 beyond their ends, and where they are real."""
    offsets = torch.arange(int(lengths.max()))
    real = offsets < lengths[:, None]
    return (starts[:, None] + offsets).masked_fill(~real, 0), real


def _similar(descending: list[int]) -> list[slice]:
    """Runs of lengths within a factor of two of their first one."""
    slices, first = [], 0
    for i, length in enumerate(descending):
        if 2 * length < descending[first]:
            slices.append(slice(first, i))
            first = i
    return [*slices, slice(first, len(descending))]


def attend(query: Tensor, key: Tensor, value: Tensor, row: PackedRow, scale: float | None = None) -> Tensor:
    """Causal attention inside each sample: queries [T_own, h, d], keys and values [T, g, d] -> [T_own, h * d].

    Keys and values are those of all ranks, rank by rank; `scale` None is 1 / sqrt(d).
    """
    grouped = key.shape[1] != query.shape[1]
    laid = []
    for block in row.blocks:
        q = query[block.queries].transpose(1, 2)  # [m, h, Lq, d]
        k, v = (t[block.keys].transpose(1, 2) for t in (key, value))  # [m, g, Lk, d]
        one_each = grouped and block.bias is not None and q.is_cuda  # no fused CUDA kernel takes both groups and a mask
        if one_each:
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        assert block.behind is None or block.bias is not None, "the row lacks its biases"
        # Padding stands after the last token of its sample, so the causal mask alone hides it.
        out = F.scaled_dot_product_attention(
            q, k, v, block.bias, is_causal=block.bias is None, scale=scale, enable_gqa=grouped and not one_each
        )
        laid.append(out.transpose(1, 2).flatten(2).flatten(0, 1))  # [m * Lq, h * d]
    return torch.cat(laid).index_select(0, row.source)


class PackedDotProductAttention(MegatronModule):
    """Causal attention inside each sample of a packed row; takes the place of the spec's core attention."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, **kwargs):
        super().__init__(config=config)
        self.softmax_scale = softmax_scale  # None: 1 / sqrt(d)

    def forward(
        self,
        query: Tensor,  # [T_own, 1, h, d]
        key: Tensor,  # [T_own, 1, g, d]
        value: Tensor,  # [T_own, 1, g, d]
        attention_mask=None,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params: PackedRow | None = None,
    ) -> Tensor:  # [T_own, 1, h * d]
        assert isinstance(packed_seq_params, PackedRow), "rows reach the model through pack_row"
        query, key, value = query.squeeze(1), key.squeeze(1), value.squeeze(1)
        if self.config.context_parallel_size > 1:
            # Backward, each rank gets back the sum of what all ranks' queries ask of its keys and values.
            both = tensor_parallel.gather_from_sequence_parallel_region(
                torch.cat([key, value], 1), group=parallel_state.get_context_parallel_group()
            )
            key, value = both.chunk(2, 1)  # [T, g, d] each, rank by rank
        return attend(query, key, value, packed_seq_params, self.softmax_scale).unsqueeze(1)


class ThdAttention(MegatronModule):
    """The same by Transformer Engine's fused attention, which knows the borders itself (its THD layout)."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, **kwargs):
        from megatron.core.extensions import transformer_engine

        super().__init__(config=config)
        self.inner = transformer_engine.TEDotProductAttention(
            config, layer_number, AttnMaskType.padding_causal, attention_type, **kwargs
        )

    def forward(
        self,
        query: Tensor,  # [T_own, 1, h, d]
        key: Tensor,  # [T_own, 1, g, d]
        value: Tensor,  # [T_own, 1, g, d]
        attention_mask=None,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params: PackedRow | None = None,
    ) -> Tensor:  # [T_own, 1, h * d]
        assert isinstance(packed_seq_params, PackedRow), "rows reach the model through pack_row"
        assert not packed_seq_params.shares_prompts, "its kernel takes every border for the end of a sample"
        whole = packed_seq_params.cu_seqlens_q.int()
        borders = PackedSeqParams(
            qkv_format="thd",
            # Those of whole samples: under context parallelism it divides them itself, and then asks for the padded
            # ones too. The padding that makes samples divisible counts as tokens, which causal attention hides.
            cu_seqlens_q=whole,
            cu_seqlens_kv=whole,
            cu_seqlens_q_padded=whole if self.config.context_parallel_size > 1 else None,
            cu_seqlens_kv_padded=whole if self.config.context_parallel_size > 1 else None,
            max_seqlen_q=packed_seq_params.max_seqlen_q,
            max_seqlen_kv=packed_seq_params.max_seqlen_kv,
        )
        out = self.inner(
            *(t.squeeze(1) for t in (query, key, value)),
            attention_mask=None,
            attn_mask_type=AttnMaskType.padding_causal,
            packed_seq_params=borders,
        )
        return out.reshape(len(query), 1, -1)


class PackedRotaryEmbedding(nn.Module):
    """Rotary angles by the row's own positions, with any inverse frequencies (llama3 scaling included).

    Takes the place of the GPTModel's rotary embedding: `get_rotary_seq_len` hands the positions to `forward`.
    """

    def __init__(self, inv_freq: Tensor) -> None:
        super().__init__()
        self.inv_freq = inv_freq  # [d / 2] float32; no buffer, so that no cast of the model reaches it

    def get_rotary_seq_len(self, inference_context, transformer, transformer_input, config, packed_seq_params, **_):
        """The positions [T_own] of the row (megatron-core asks for a length; only `forward` reads the answer)."""
        return packed_seq_params.position_ids

    def forward(self, position_ids: Tensor, *args, **kwargs) -> Tensor:  # [T_own, 1, 1, d]
        angles = torch.outer(position_ids.float(), self.inv_freq.to(position_ids.device))
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]
