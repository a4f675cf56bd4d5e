"""Mistral 7B and its kin: Llama's tensors; the first versions have a sliding window, which transformers applies."""

from d3s_megatron.convert.family import Biases, Config, Family


def window(config: Config) -> int | None:
    """`sliding_window` holds for every layer; null means none."""
    return config["sliding_window"]


FAMILY = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    biases=lambda config: Biases(),
    qk_norm=False,
    window=window,
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
)
