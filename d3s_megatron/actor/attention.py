"""Attention over packed rows for megatron-core without Transformer Engine.

A packed row holds n samples one after the other, [T, 1, ...]. Attention must not see across their borders and
positions restart at 0. megatron-core's own CPU attention knows no packing; here the samples of a row are laid out
as small rectangles (`blocks`), torch's scaled_dot_product_attention runs on each, and the result goes back into the
row. Samples share a rectangle only if their lengths are within a factor of two, so at most half of it is padding.

Shapes: T tokens of the row, h heads of this rank, g key/value groups of this rank, d head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn


@dataclass
class PackedRow(PackedSeqParams):
    """Borders of a packed row as megatron-core hands them from layer to layer, made by `pack_row`."""

    position_ids: Tensor = field(default=None)  # [T]
    blocks: tuple[Tensor, ...] = ()  # row indices [m, L] of each rectangle; those of padding point at row 0
    source: Tensor = field(default=None)  # [T] where each row stands in the rectangles, laid end to end


def pack_row(cu_seqlens: Tensor, position_ids: Tensor, device: torch.device) -> PackedRow:
    """Row borders [n + 1] and positions [T] to what the layers need, on `device`."""
    starts, lengths = cu_seqlens[:-1].tolist(), (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    groups: list[list[int]] = []
    for i in order:
        if groups and 2 * lengths[i] >= lengths[groups[-1][0]]:
            groups[-1].append(i)
        else:
            groups.append([i])
    blocks, source, laid = [], torch.empty(sum(lengths), dtype=torch.int64), 0
    for group in groups:
        offsets = torch.arange(lengths[group[0]])
        valid = offsets[None, :] < torch.tensor([lengths[i] for i in group])[:, None]
        index = (torch.tensor([starts[i] for i in group])[:, None] + offsets[None, :]).masked_fill(~valid, 0)
        source[index[valid]] = laid + valid.flatten().nonzero().flatten()
        laid += valid.numel()
        blocks.append(index.to(device))
    return PackedRow(
        # Not "thd": megatron-core then leaves [T, 1, ...] and the rotary embedding below alone.
        qkv_format="sbhd",
        cu_seqlens_q=cu_seqlens.to(device),
        cu_seqlens_kv=cu_seqlens.to(device),
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        position_ids=position_ids.to(device),
        blocks=tuple(blocks),
        source=source.to(device),
    )


class PackedDotProductAttention(MegatronModule):
    """Causal attention inside each sample of a packed row; takes the place of the spec's core attention."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, **kwargs):
        super().__init__(config=config)
        self.softmax_scale = softmax_scale  # None: 1 / sqrt(d)

    def forward(
        self,
        query: Tensor,  # [T, 1, h, d]
        key: Tensor,  # [T, 1, g, d]
        value: Tensor,  # [T, 1, g, d]
        attention_mask=None,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params: PackedRow | None = None,
    ) -> Tensor:  # [T, 1, h * d]
        assert isinstance(packed_seq_params, PackedRow), "rows reach the model through pack_row"
        query, key, value = query.squeeze(1), key.squeeze(1), value.squeeze(1)
        grouped = key.shape[1] != query.shape[1]
        laid = []
        for index in packed_seq_params.blocks:
            q, k, v = (t[index].transpose(1, 2) for t in (query, key, value))  # [m, heads, L, d]
            # Padding stands after the last token of its sample, so the causal mask alone hides it.
            block = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=grouped
            )
            laid.append(block.transpose(1, 2).flatten(2).flatten(0, 1))  # [m * L, h * d]
        return torch.cat(laid).index_select(0, packed_seq_params.source).unsqueeze(1)


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
        query: Tensor,  # [T, 1, h, d]
        key: Tensor,  # [T, 1, g, d]
        value: Tensor,  # [T, 1, g, d]
        attention_mask=None,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params: PackedRow | None = None,
    ) -> Tensor:  # [T, 1, h * d]
        assert isinstance(packed_seq_params, PackedRow), "rows reach the model through pack_row"
        borders = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=packed_seq_params.cu_seqlens_q.int(),
            cu_seqlens_kv=packed_seq_params.cu_seqlens_kv.int(),
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
        """The positions [T] of the row (megatron-core asks for a length; only `forward` reads the answer)."""
        return packed_seq_params.position_ids

    def forward(self, position_ids: Tensor, *args, **kwargs) -> Tensor:  # [T, 1, 1, d]
        angles = torch.outer(position_ids.float(), self.inv_freq.to(position_ids.device))
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]
