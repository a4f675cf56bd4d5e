"""The mapping itself: for one model, each Megatron tensor with the Hugging Face tensors it is made of.

Megatron names are global (layer numbers count through all pipeline stages) and come in two spellings, that of the
local layer spec and that of Transformer Engine's, which keeps each norm inside the linear layer after it. Lookups
accept both; lists are in the one asked for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from d3s_megatron.convert.shape import ModelShape

Spec = Literal["local", "te"]

# How a Megatron tensor is laid out, and with that how tensor parallelism cuts it:
#   vocab       rows of the vocabulary, padded with zeros, then cut evenly
#   qkv         per KV group its queries, its key, its value, one after the other; rows cut evenly
#   gate_up     gate above up; each rank holds its rows of gate above its rows of up
#   columns     cut along the second dimension
#   replicated  whole on every rank
Layout = Literal["vocab", "qkv", "gate_up", "columns", "replicated"]

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
FINAL_NORM = "decoder.final_layernorm.weight"
HF_EMBEDDING = "model.embed_tokens.weight"
HF_HEAD = "lm_head.weight"

_TE_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
LOCAL_NORMS = {te: local for local, te in _TE_NORMS.items()}
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")


@dataclass(frozen=True)
class Rule:
    """One Megatron tensor and its Hugging Face sources, in the order in which they are combined."""

    megatron: str
    hf: tuple[str, ...]
    layout: Layout


@lru_cache(maxsize=8)
def rules(shape: ModelShape, spec: Spec = "local") -> tuple[Rule, ...]:
    """Every tensor of the model once, in the order of a forward pass; a tied head is no tensor of its own."""
    found = [Rule(EMBEDDING, (HF_EMBEDDING,), "vocab")]
    for layer in range(shape.num_layers):
        for rule in _layer_rules(shape):
            name = _TE_NORMS.get(rule.megatron, rule.megatron) if spec == "te" else rule.megatron
            hf = tuple(f"model.layers.{layer}.{part}" for part in rule.hf)
            found.append(Rule(f"decoder.layers.{layer}.{name}", hf, rule.layout))
    found.append(Rule(FINAL_NORM, ("model.norm.weight",), "replicated"))
    if not shape.tied:
        found.append(Rule(OUTPUT, (HF_HEAD,), "vocab"))
    return tuple(found)


def _layer_rules(shape: ModelShape) -> list[Rule]:
    qkv = tuple(f"self_attn.{part}_proj" for part in "qkv")
    gate_up = ("mlp.gate_proj", "mlp.up_proj")

    def parts(modules: tuple[str, ...], kind: str) -> tuple[str, ...]:
        return tuple(f"{module}.{kind}" for module in modules)

    found = [
        Rule("input_layernorm.weight", ("input_layernorm.weight",), "replicated"),
        Rule("self_attention.linear_qkv.weight", parts(qkv, "weight"), "qkv"),
    ]
    if shape.qkv_bias:
        found.append(Rule("self_attention.linear_qkv.bias", parts(qkv, "bias"), "qkv"))
    if shape.qk_norm:
        found += [
            Rule(f"self_attention.{part}_layernorm.weight", (f"self_attn.{part}_norm.weight",), "replicated")
            for part in "qk"
        ]
    found.append(Rule("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), "columns"))
    if shape.linear_bias:
        found.append(Rule("self_attention.linear_proj.bias", ("self_attn.o_proj.bias",), "replicated"))
    found += [
        Rule("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), "replicated"),
        Rule("mlp.linear_fc1.weight", parts(gate_up, "weight"), "gate_up"),
    ]
    if shape.linear_bias:
        found.append(Rule("mlp.linear_fc1.bias", parts(gate_up, "bias"), "gate_up"))
    found.append(Rule("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), "columns"))
    if shape.linear_bias:
        found.append(Rule("mlp.linear_fc2.bias", ("mlp.down_proj.bias",), "replicated"))
    return found


@lru_cache(maxsize=8)
def _by_name(shape: ModelShape) -> dict[str, Rule]:
    return {rule.megatron: rule for spec in ("te", "local") for rule in rules(shape, spec)}


def rule_of(shape: ModelShape, megatron_name: str) -> Rule:
    """Rule of one Megatron tensor, in either spelling; ValueError for a name the model does not have.

    A tied model's `output_layer.weight`, the copy its last pipeline stage holds, is made of the embedding.
    """
    rule = _by_name(shape).get(megatron_name)
    if rule is None and shape.tied and megatron_name == OUTPUT:
        return replace(_by_name(shape)[EMBEDDING], megatron=OUTPUT)
    if rule is None:
        raise ValueError(
            f"unknown Megatron tensor {megatron_name!r} for a {shape.family} model of {shape.num_layers} layers: names "
            "are those of megatron-core's GPTModel, with layer numbers that count through all pipeline stages"
        )
    return rule


def global_name(local_name: str, first_layer: int) -> str:
    """Name of a stage's own parameter with the layer number counted through all stages; other names stay."""
    match = _LAYER.match(local_name)
    return f"decoder.layers.{int(match[1]) + first_layer}.{match[2]}" if match else local_name


def megatron_names(shape: ModelShape, spec: Spec = "local") -> list[str]:
    """Every Megatron tensor of the model, in the order of a forward pass."""
    return [rule.megatron for rule in rules(shape, spec)]


def expected_hf_names(shape: ModelShape) -> list[str]:
    """Every Hugging Face tensor of the model, in the order of a forward pass; no lm_head.weight where it is tied."""
    return [name for rule in rules(shape) for name in rule.hf]


def hf_shape(shape: ModelShape, hf_name: str) -> tuple[int, ...]:
    """Shape a Hugging Face tensor must have; ValueError for a name the model does not have."""
    sizes = {
        "embed_tokens": (shape.vocab_size, shape.hidden_size),
        "lm_head": (shape.vocab_size, shape.hidden_size),
        "q_proj": (shape.num_heads * shape.head_dim, shape.hidden_size),
        "k_proj": (shape.num_kv_heads * shape.head_dim, shape.hidden_size),
        "v_proj": (shape.num_kv_heads * shape.head_dim, shape.hidden_size),
        "o_proj": (shape.hidden_size, shape.num_heads * shape.head_dim),
        "gate_proj": (shape.ffn_size, shape.hidden_size),
        "up_proj": (shape.ffn_size, shape.hidden_size),
        "down_proj": (shape.hidden_size, shape.ffn_size),
        "q_norm": (shape.head_dim,),
        "k_norm": (shape.head_dim,),
        "input_layernorm": (shape.hidden_size,),
        "post_attention_layernorm": (shape.hidden_size,),
        "norm": (shape.hidden_size,),
    }
    module, _, kind = hf_name.rpartition(".")
    size = sizes.get(module.rpartition(".")[2])
    if size is None or kind not in ("weight", "bias"):
        raise ValueError(f"unknown Hugging Face tensor {hf_name!r} for a {shape.family} model")
    return size if kind == "weight" else size[:1]
