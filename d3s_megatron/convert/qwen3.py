"""Qwen3 (dense): q/k norm, and a head_dim of its own that need not be hidden_size / heads."""

from d3s_megatron.convert.family import Biases, Config, Family, switched_window


def biases(config: Config) -> Biases:
    """`attention_bias` stands for q, k, v and o_proj together."""
    on = bool(config.get("attention_bias", False))
    return Biases(qkv=on, o_proj=on)


FAMILY = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    biases=biases,
    qk_norm=True,
    window=switched_window,
    defaults={"num_key_value_heads": 32, "head_dim": 128},
)
