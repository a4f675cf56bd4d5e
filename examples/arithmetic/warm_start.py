"""A tiny model that can already add a little: a 0.3M Qwen2, trained by supervised steps until 30% of answers are right.

It is an ordinary Hugging Face folder afterwards, tokenizer included, so that the main job runs on it as on any other.
Stopping early is the point: groups of answers are then mixed, and reinforcement learning has room to improve.

    python -m d3s_megatron.data.arithmetic --out runs/arithmetic --seed 0
    python examples/arithmetic/warm_start.py --data runs/arithmetic --out runs/arithmetic/model --seed 0
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from d3s_megatron.data import DataConfig, Problem, load_problems

END = "<|endoftext|>"
BATCH = 64
LEARNING_RATE = 3e-3
BETAS = (0.9, 0.98)
WARMUP_STEPS = 20  # without it, AdamW's first steps are the size of the weights
CHECK_EVERY = 5  # accuracy rises by up to 0.02 in five steps near the target
CHECK_PROBLEMS = 500


def build_tokenizer() -> Qwen2Tokenizer:
    """One token a character, and an end that is the padding too, as in Qwen2.5-Math.

    It is Qwen2's own tokenizer with 13 entries and no merges: AutoTokenizer puts Qwen2's splitting rules in place of
    any other tokenizer it finds beside a Qwen2 model.
    """
    vocab = {token: i for i, token in enumerate([*"0123456789+=", END])}
    return Qwen2Tokenizer(vocab=vocab, merges=[], unk_token=END, eos_token=END, pad_token=END)


def build_model(tokenizer: Qwen2Tokenizer, seed: int, hidden_size: int) -> Qwen2ForCausalLM:
    """A Qwen2 of 0.3M parameters (at 96 hidden units) with tied embeddings and random weights."""
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=hidden_size,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def encode(problems: Sequence[Problem], tokenizer: Qwen2Tokenizer) -> tuple[Tensor, int]:
    """Rows [n, 10] of problem, answer and end of sequence, and the number of problem tokens in each."""
    rows = tokenizer([p.problem + p.answer + tokenizer.eos_token for p in problems])["input_ids"]
    return torch.tensor(rows), len(problems[0].problem)


def answer_log_probs(model: Qwen2ForCausalLM, rows: Tensor, num_prompt: int) -> Tensor:
    """Log-probs [n, 4] of the answer tokens, the end included."""
    logits = model(input_ids=rows[:, :-1]).logits[:, num_prompt - 1 :].float()
    return logits.log_softmax(-1).gather(2, rows[:, num_prompt:, None])[..., 0]


@torch.no_grad()
def accuracy(model: Qwen2ForCausalLM, rows: Tensor, num_prompt: int) -> float:
    """The exact expectation of the accuracy at temperature 1: the mean probability of the right answer."""
    return answer_log_probs(model, rows, num_prompt).sum(1).exp().mean().item()


def warm_start(data: Path, out: Path, seed: int, target: float, steps: int, hidden_size: int = 96) -> float:
    """Trains until the target or the last step, saves the folder, and returns the held-out accuracy reached."""
    transformers.utils.logging.disable_progress_bar()
    config = DataConfig(prompt_template="raw")
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed, hidden_size)
    train, num_prompt = encode(load_problems(data / "train.jsonl", config), tokenizer)
    held_out, _ = encode(load_problems(data / "eval.jsonl", config), tokenizer)
    check = held_out[:CHECK_PROBLEMS]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=0.0, fused=True)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS))
    generator = torch.Generator().manual_seed(seed)
    started = time.monotonic()
    for step in range(1, steps + 1):
        rows = train[torch.randint(len(train), (BATCH,), generator=generator)]
        loss = -answer_log_probs(model, rows, num_prompt).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        warmup.step()
        if step % CHECK_EVERY == 0:
            reached = accuracy(model, check, num_prompt)
            if step % 50 == 0 or reached >= target:
                seconds = time.monotonic() - started
                print(f"step {step:4d}  loss {loss.item():.3f}  accuracy {reached:.3f}  {seconds:.1f} s", flush=True)
            if reached >= target:
                break
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return accuracy(model, held_out, num_prompt)


def main() -> int:
    """Command line; exits with 1 where the target was not reached."""
    parser = argparse.ArgumentParser(description="Train a tiny Qwen2 to add a little and save it as a model folder.")
    parser.add_argument("--data", type=Path, required=True, help="folder with train.jsonl and eval.jsonl")
    parser.add_argument("--out", type=Path, required=True, help="folder for model and tokenizer")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and batches (default 0)")
    parser.add_argument("--target-accuracy", type=float, default=0.30, help="stop here (default 0.30)")
    parser.add_argument("--steps", type=int, default=1000, help="most steps to take (default 1000)")
    parser.add_argument("--hidden-size", type=int, default=96, help="width over 4 heads (default 96)")
    args = parser.parse_args()
    reached = warm_start(args.data, args.out, args.seed, args.target_accuracy, args.steps, args.hidden_size)
    print(f"held-out accuracy at temperature 1: {reached:.3f}; model folder: {args.out}")
    if reached < 0.8 * args.target_accuracy:
        print(
            f"the target {args.target_accuracy} was not reached in {args.steps} steps; raise --steps", file=sys.stderr
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
