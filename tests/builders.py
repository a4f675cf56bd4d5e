"""Tiny builders that tests share: a random Hugging Face model folder, samples, and a run configuration."""

from __future__ import annotations

from pathlib import Path

import torch

from d3s_megatron.types import Sample

CHARACTERS = "0123456789+="


def tiny_model(folder: Path, family: str = "qwen2", seed: int = 0, **changes) -> Path:
    """Saves a random 2-layer model with its character tokenizer; returns the folder."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    kinds = {
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }
    config_type, model_type = kinds[family]
    settings = dict(
        vocab_size=14,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=12,
        pad_token_id=13,
        bos_token_id=None,
        initializer_range=0.2,  # wide, so that answers differ
    )
    torch.manual_seed(seed)
    model = model_type(config_type(**(settings | changes)))
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def tokenizer():
    """One token a character, then <eos> and <pad>."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {c: i for i, c in enumerate([*CHARACTERS, "<eos>", "<pad>"])}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>")


def random_samples(
    num: int, seed: int = 0, vocab_size: int = 12, longest: int = 9, per_prompt: int = 1
) -> list[Sample]:
    """Samples of uneven lengths with made-up rollout log-probs and advantages of both signs."""
    generator = torch.Generator().manual_seed(seed)

    def ids(low: int) -> tuple[int, ...]:
        length = int(torch.randint(low, longest, (), generator=generator))
        return tuple(torch.randint(0, vocab_size, (length,), generator=generator).tolist())

    samples = []
    for uid in range(num):
        prompt = samples[-1].prompt_ids if uid % per_prompt else ids(2)
        response = ids(1)
        samples.append(
            Sample(
                uid=uid,
                prompt_ids=prompt,
                response_ids=response,
                rollout_log_probs=(-1.0,) * len(response),
                advantage=float(torch.randn((), generator=generator)),
            )
        )
    return samples


def addition_file(path: Path, num: int = 12) -> Path:
    """Writes `num` one-digit additions as JSON lines; returns the path."""
    import json

    rows = [{"id": f"add-{i}", "problem": f"{i % 7}+{i % 5}=", "answer": str(i % 7 + i % 5)} for i in range(num)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tiny_run(model: Path, data: Path, out: Path, steps: int) -> dict[str, object]:
    """Settings of a short run on a tiny model: 4 prompts x 4 answers a step, N from 2 to 4."""
    return {
        "model.path": model,
        "data.train_path": data,
        "data.eval_path": data,
        "data.prompt_template": "raw",
        "data.max_prompt_tokens": 16,
        "rollout.max_new_tokens": 6,
        "rewards.kind": "reward_functions:even_length",
        "rewards.num_workers": 1,
        "rewards.deadline_seconds": 1200,  # no verdict depends on how busy the machine is
        "algorithm.samples_per_prompt": 4,
        "algorithm.truncated": "judge",  # a random model seldom stops by itself
        "algorithm.kept_per_prompt_init": 2,
        "algorithm.kept_per_prompt_final": 4,
        "optimizer.lr": 1e-3,
        "train.steps": steps,
        "train.prompts_per_step": 4,
        "train.eval_samples": 2,
        "train.output_dir": out,
    }
