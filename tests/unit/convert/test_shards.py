"""Shards of small whole numbers: exact places, and back again for every degree."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from d3s_megatron.convert.names import expected_hf_names, megatron_names
from d3s_megatron.convert.parallel import check_tp, padded_vocab_size
from d3s_megatron.convert.shape import read_shape
from d3s_megatron.convert.shards import hf_tensors_from_full, megatron_shape, merge_shards, shard_from_hf

from .builders import ARCHITECTURES, counting_state, tiny_config


def shards_of(shape, state, name, tp, multiple=4):
    padded = padded_vocab_size(shape.vocab_size, multiple, tp)
    return [shard_from_hf(shape, name, rank, tp, padded, state.__getitem__) for rank in range(tp)]


def round_trip(shape, state, tp):
    back = {}
    for name in megatron_names(shape):
        back |= hf_tensors_from_full(shape, name, merge_shards(shape, name, shards_of(shape, state, name, tp)))
    return back


def test_qkv_is_interleaved_by_group():
    shape = read_shape(tiny_config(hidden_size=8, head_dim=2))  # 4 heads, 2 groups
    state = counting_state(shape)
    q, k, v = (state[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv")
    whole = shards_of(shape, state, "decoder.layers.0.self_attention.linear_qkv.weight", 1)[0]
    assert torch.equal(whole, torch.cat([q[:4], k[:2], v[:2], q[4:], k[2:], v[2:]]))
    second = shards_of(shape, state, "decoder.layers.0.self_attention.linear_qkv.weight", 2)[1]
    assert torch.equal(second, torch.cat([q[4:], k[2:], v[2:]]))


def test_bias_has_the_order_of_the_weight():
    shape = read_shape(tiny_config())
    state = counting_state(shape)
    for part, base in (("q", 0), ("k", 100), ("v", 200)):
        rows = state[f"model.layers.0.self_attn.{part}_proj.bias"].numel()
        state[f"model.layers.0.self_attn.{part}_proj.bias"] = torch.arange(base, base + rows)
        state[f"model.layers.0.self_attn.{part}_proj.weight"] = torch.arange(base, base + rows)[:, None].expand(-1, 16)
    for tp in (1, 2, 4):
        names = [f"decoder.layers.0.self_attention.linear_qkv.{kind}" for kind in ("weight", "bias")]
        weights, biases = (shards_of(shape, state, name, tp) for name in names)
        assert all(torch.equal(w[:, 0], b) for w, b in zip(weights, biases, strict=True))


def test_each_rank_holds_gate_above_up():
    shape = read_shape(tiny_config())
    state = counting_state(shape)
    gate, up = (state[f"model.layers.1.mlp.{part}_proj.weight"] for part in ("gate", "up"))
    shards = shards_of(shape, state, "decoder.layers.1.mlp.linear_fc1.weight", 2)
    assert torch.equal(shards[0], torch.cat([gate[:6], up[:6]]))
    assert torch.equal(shards[1], torch.cat([gate[6:], up[6:]]))


def test_columns_and_replicated():
    shape = read_shape(tiny_config())
    state = counting_state(shape)
    down = state["model.layers.0.mlp.down_proj.weight"]
    assert torch.equal(shards_of(shape, state, "decoder.layers.0.mlp.linear_fc2.weight", 4)[1], down[:, 3:6])
    norm = state["model.norm.weight"]
    assert all(torch.equal(shard, norm) for shard in shards_of(shape, state, "decoder.final_layernorm.weight", 2))


def test_vocabulary_is_padded_with_zeros_once():
    assert [padded_vocab_size(10, 4, tp) for tp in (1, 2, 4)] == [12, 16, 16]
    assert [padded_vocab_size(151936, 128, tp) for tp in (2, 8)] == [152064, 152576]
    shape = read_shape(tiny_config(vocab_size=10))
    state = counting_state(shape)
    last = shards_of(shape, state, "embedding.word_embeddings.weight", 4)[2:]
    assert torch.equal(last[0], torch.cat([state["model.embed_tokens.weight"][8:], torch.zeros(2, 16)]))
    assert torch.equal(last[1], torch.zeros(4, 16))  # a rank may hold padding alone


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_round_trip_is_exact(family, tied, tp):
    shape = read_shape(tiny_config(family, tie_word_embeddings=tied, num_attention_heads=4))
    state = counting_state(shape)
    back = round_trip(shape, state, tp)
    assert list(back) == expected_hf_names(shape)
    assert all(torch.equal(back[name], state[name]) for name in state)


@settings(max_examples=40, deadline=None)
@given(
    groups=st.sampled_from([1, 2, 4, 8]),
    per_group=st.integers(1, 4),
    tp=st.sampled_from([1, 2, 4, 8]),
    vocab=st.integers(1, 40),
    multiple=st.integers(1, 9),
    bias=st.booleans(),
)
def test_round_trip_for_any_shape(groups, per_group, tp, vocab, multiple, bias):
    config = tiny_config(
        "llama",
        hidden_size=8,
        head_dim=2,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=groups * per_group,
        num_key_value_heads=groups,
        vocab_size=vocab,
        attention_bias=bias,
        mlp_bias=bias,
    )
    shape = read_shape(config)
    try:
        check_tp(shape, tp)
    except ValueError:
        return
    state = counting_state(shape)
    back = {}
    for name in megatron_names(shape, "te"):
        shards = shards_of(shape, state, name, tp, multiple)
        assert len({shard.shape for shard in shards}) == 1
        back |= hf_tensors_from_full(shape, name, merge_shards(shape, name, shards))
    assert back.keys() == state.keys() and all(torch.equal(back[name], state[name]) for name in state)


def test_bf16_is_bit_equal_and_fp32_is_cast_on_request():
    shape = read_shape(tiny_config())
    state = counting_state(shape, torch.bfloat16)
    assert all(tensor.dtype == torch.bfloat16 for tensor in round_trip(shape, state, 2).values())
    name = "embedding.word_embeddings.weight"
    shard = shard_from_hf(shape, name, 0, 1, 12, counting_state(shape).__getitem__, dtype=torch.bfloat16)
    assert shard.dtype == torch.bfloat16 and shard.shape == (12, 16)


def test_tied_head_is_loaded_but_never_exported():
    shape = read_shape(tiny_config(tie_word_embeddings=True))
    state = counting_state(shape)
    head = shards_of(shape, state, "output_layer.weight", 1)[0]
    assert torch.equal(head[:11], state["model.embed_tokens.weight"])
    assert list(hf_tensors_from_full(shape, "output_layer.weight", head[:11])) == []


@pytest.mark.parametrize(
    ("changes", "tp", "words"),
    [
        ({"num_attention_heads": 14, "hidden_size": 896}, 4, "num_attention_heads 14.*tensor parallel size 4"),
        ({"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 4}, 3, "num_key_value_heads 2.*size 3"),
        ({"intermediate_size": 13}, 2, "intermediate_size 13"),
        ({}, 0, "expected 1 or more"),
    ],
)
def test_degrees_that_do_not_divide_are_refused(changes, tp, words):
    with pytest.raises(ValueError, match=words):
        check_tp(read_shape(tiny_config(**changes)), tp)


def test_wrong_sizes_are_named():
    shape = read_shape(tiny_config())
    state = counting_state(shape)
    state["model.layers.0.mlp.gate_proj.weight"] = torch.zeros(14, 16)
    with pytest.raises(ValueError, match="gate_proj.weight has shape"):
        shards_of(shape, state, "decoder.layers.0.mlp.linear_fc1.weight", 2)
    with pytest.raises(ValueError, match="one shard per tensor-parallel rank"):
        merge_shards(shape, "decoder.layers.0.mlp.linear_fc2.weight", [torch.zeros(16, 6)])
    with pytest.raises(ValueError, match="no vocabulary padding"):
        list(hf_tensors_from_full(shape, "embedding.word_embeddings.weight", torch.zeros(12, 16)))
    with pytest.raises(ValueError, match="pad the vocabulary"):
        shard_from_hf(shape, "embedding.word_embeddings.weight", 0, 2, 11, state.__getitem__)
    assert megatron_shape(shape, "decoder.layers.0.self_attention.linear_qkv.weight") == (32, 16)
