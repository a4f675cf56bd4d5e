"""The two core attentions over one packed row."""

import pytest
import torch
from builders import random_samples
from megatron.core.extensions import transformer_engine
from megatron.core.transformer.transformer_config import TransformerConfig

from d3s_megatron.actor import attention
from d3s_megatron.actor.attention import PackedDotProductAttention, ThdAttention, attend, pack_row
from d3s_megatron.actor.config import ActorConfig
from d3s_megatron.actor.model import check_transformer_engine
from d3s_megatron.actor.packing import pack


class PlainThd(torch.nn.Module):
    """What Transformer Engine is asked for, one sample at a time: [T, heads, d] in, [T, heads * d] out."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, pg_collection=None):
        super().__init__()
        assert attn_mask_type.name == "padding_causal"

    def forward(self, query, key, value, attention_mask, attn_mask_type, packed_seq_params):
        assert packed_seq_params.qkv_format == "thd" and packed_seq_params.cu_seqlens_q.dtype == torch.int32
        borders = packed_seq_params.cu_seqlens_q.tolist()
        assert packed_seq_params.max_seqlen_q == max(b - a for a, b in zip(borders, borders[1:], strict=False))
        out = []
        for start, end in zip(borders, borders[1:], strict=False):
            q, k, v = (t[start:end].transpose(0, 1) for t in (query, key, value))
            k, v = (t.repeat_interleave(len(q) // len(t), 0) for t in (k, v))
            scores = q @ k.mT / q.shape[-1] ** 0.5
            scores = scores.masked_fill(torch.ones_like(scores[0], dtype=torch.bool).triu(1), -torch.inf)
            out.append((scores.softmax(-1) @ v).transpose(0, 1).flatten(1))
        return torch.cat(out)


def test_both_attend_inside_the_borders_alone(monkeypatch):
    monkeypatch.setattr(transformer_engine, "TEDotProductAttention", PlainThd)
    config = TransformerConfig(num_layers=1, hidden_size=24, num_attention_heads=6, num_query_groups=2)
    settings = dict(layer_number=1, attn_mask_type=None, attention_type="self", pg_collection=None)
    lengths = torch.tensor([5, 1, 9, 4])
    borders = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    row = pack_row(borders, torch.cat([torch.arange(n) for n in lengths.tolist()]), torch.device("cpu"))
    g = torch.Generator().manual_seed(0)
    q = torch.randn(19, 1, 6, 4, generator=g)
    k, v = torch.randn(2, 19, 1, 2, 4, generator=g)
    ours = PackedDotProductAttention(config, **settings)(q, k, v, packed_seq_params=row)
    theirs = ThdAttention(config, **settings)(q, k, v, packed_seq_params=row)
    assert ours.shape == (19, 1, 24)
    torch.testing.assert_close(theirs, ours)


class ThdOfOneRank(torch.nn.Module):
    """What Transformer Engine is asked for under context parallelism: it has the other ranks' keys by itself."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, pg_collection=None):
        super().__init__()
        # From these megatron-core's own wrapper takes the group, its ranks and a stream.
        assert config.context_parallel_size == 2 and pg_collection == "groups"

    def forward(self, query, key, value, attention_mask, attn_mask_type, packed_seq_params):
        borders = packed_seq_params.cu_seqlens_q
        assert borders.dtype == torch.int32 and borders.tolist() == [0, 8, 12, 24]  # of whole samples
        for other in ("cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
            assert torch.equal(getattr(packed_seq_params, other), borders)
        assert packed_seq_params.max_seqlen_q == packed_seq_params.max_seqlen_kv == 12
        return torch.cat([query.flatten(1), key.flatten(1), value.flatten(1)], 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_transformer_engine_is_handed_a_share_with_the_borders_of_whole_samples(rank, monkeypatch):
    monkeypatch.setattr(transformer_engine, "TEDotProductAttention", ThdOfOneRank)
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, context_parallel_size=2)
    borders = torch.tensor([0, 8, 12, 24])
    row = pack_row(borders, torch.arange(24), torch.device("cpu"), cp_rank=rank, cp_size=2)
    own = [0, 1, 6, 7, 8, 11, 12, 13, 14, 21, 22, 23] if rank == 0 else [2, 3, 4, 5, 9, 10, *range(15, 21)]
    assert row.position_ids.tolist() == own
    q, k, v = torch.randn(3, 12, 1, 2, 4)
    attention = ThdAttention(config, 1, None, "self", pg_collection="groups")
    handed = attention(q, k, v, packed_seq_params=row)
    assert torch.equal(handed[:, 0], torch.cat([t.flatten(1) for t in (q, k, v)], 1))


def test_transformer_engine_is_refused_where_it_cannot_run():
    check_transformer_engine(ActorConfig())
    with pytest.raises(ValueError, match="actor.dtype float32: its fused kernels take bfloat16 only"):
        ActorConfig(attention="transformer_engine")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="there is no GPU: give torch"):
            check_transformer_engine(ActorConfig(attention="transformer_engine", dtype="bfloat16"))
        with pytest.raises(ValueError, match="actor.layers is transformer_engine, but .*there is no GPU"):
            check_transformer_engine(ActorConfig(layers="transformer_engine"))


@pytest.mark.parametrize("family", [0, 12, 128])
def test_a_token_sees_its_own_sample_up_to_itself_where_samples_share_prompts(family, monkeypatch):
    monkeypatch.setattr(attention, "FAMILY", family)
    g = torch.Generator().manual_seed(0)
    for per_prompt in (1, 2, 5):
        (row,) = pack(random_samples(17, per_prompt, per_prompt=per_prompt), 1000)
        num = len(row.token_ids)
        q, (k, v) = torch.randn(num, 4, 6, generator=g), torch.randn(2, num, 2, 6, generator=g)
        packed = pack_row(row.cu_seqlens, row.position_ids, torch.device("cpu"), row.prefix)
        segment = torch.bucketize(torch.arange(num), row.cu_seqlens, right=True) - 1
        sees = (segment[:, None] == segment) | (row.prefix[segment][:, None] == segment)
        scores = q.transpose(0, 1) @ k.repeat_interleave(2, 1).permute(1, 2, 0) / 6**0.5
        weights = scores.masked_fill(~sees.tril(), -torch.inf).softmax(-1)
        want = (weights @ v.repeat_interleave(2, 1).transpose(0, 1)).transpose(0, 1).flatten(1)
        torch.testing.assert_close(attend(q, k, v, packed), want)
