"""Qwen2, Qwen2.5 and Qwen2.5-Math: biases on q, k and v, always, and nowhere else (no config key says so)."""

from d3s_megatron.convert.family import Biases, Family, switched_window

FAMILY = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    biases=lambda config: Biases(qkv=True),
    qk_norm=False,
    window=switched_window,
    defaults={"num_key_value_heads": 32},
)
