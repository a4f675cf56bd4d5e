"""A random model that is small, but has everything that a layout can get wrong."""

from __future__ import annotations

from pathlib import Path

import torch


def tiny_model(folder: Path) -> Path:
    """Saves a Qwen2-shaped model: grouped queries, QKV biases, tied embedding, padded vocabulary, four layers."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=300,  # padded to 384 columns for one rank, to 512 for two
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.2,  # wide, so that entropies differ
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.2)
    model.save_pretrained(folder)
    return folder
