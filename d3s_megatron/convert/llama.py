"""Llama 2, 3, 3.1 and 3.2 (and what shares their class, such as SmolLM2): no biases unless config.json asks."""

from d3s_megatron.convert.family import Biases, Config, Family, full_attention


def biases(config: Config) -> Biases:
    """`attention_bias` stands for q, k, v and o_proj together, `mlp_bias` for gate, up and down."""
    attention = bool(config.get("attention_bias", False))
    return Biases(qkv=attention, o_proj=attention, mlp=bool(config.get("mlp_bias", False)))


FAMILY = Family(
    model_type="llama", architecture="LlamaForCausalLM", biases=biases, qk_norm=False, window=full_attention
)
