"""The names are those of transformers' own models and of a real Megatron GPTModel."""

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from d3s_megatron.convert.names import (
    expected_hf_names,
    global_name,
    hf_shape,
    megatron_names,
    rule_of,
    rules,
)
from d3s_megatron.convert.shape import read_shape

from .builders import VARIANTS, tiny_config


@pytest.mark.parametrize(("family", "changes"), VARIANTS)
def test_names_and_shapes_equal_transformers(family, changes):
    config = tiny_config(family, **changes)
    shape = read_shape(config)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    theirs = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if shape.tied:
        del theirs["lm_head.weight"]  # state_dict lists the shared tensor twice; a saved folder does not
    assert {name: hf_shape(shape, name) for name in expected_hf_names(shape)} == theirs


def test_every_name_once_in_both_directions():
    shape = read_shape(tiny_config())
    assert len(set(expected_hf_names(shape))) == len(expected_hf_names(shape))
    assert len(set(megatron_names(shape))) == len(rules(shape))


def test_transformer_engine_spelling_differs_in_the_norms_only():
    shape = read_shape(tiny_config())
    local, te = (set(megatron_names(shape, spec)) for spec in ("local", "te"))
    assert te - local == {
        f"decoder.layers.{i}.{name}.layer_norm_weight"
        for i in range(2)
        for name in ("self_attention.linear_qkv", "mlp.linear_fc1")
    }
    assert rule_of(shape, "decoder.layers.1.mlp.linear_fc1.layer_norm_weight").hf == (
        "model.layers.1.post_attention_layernorm.weight",
    )


def test_tied_head_is_made_of_the_embedding_and_listed_nowhere():
    shape = read_shape(tiny_config(tie_word_embeddings=True))
    assert "output_layer.weight" not in megatron_names(shape)
    assert rule_of(shape, "output_layer.weight").hf == ("model.embed_tokens.weight",)


def test_unknown_names_raise():
    shape = read_shape(tiny_config())
    for name in ("decoder.layers.2.mlp.linear_fc1.weight", "decoder.layers.0.mlp.linear_fc1.bias", "lm_head.weight"):
        with pytest.raises(ValueError, match=name):
            rule_of(shape, name)


def test_layer_numbers_count_through_stages():
    assert global_name("decoder.layers.1.mlp.linear_fc1.weight", 5) == "decoder.layers.6.mlp.linear_fc1.weight"
    assert global_name("decoder.final_layernorm.weight", 5) == "decoder.final_layernorm.weight"
