"""How far trainer and vLLM are apart when they hold the same weights, and when the engine's are old.

    python tools/measure_sync_probe.py [--models FOLDER...] [--dtype bfloat16]

What the tolerance of the probe after a weight sync rests on (d3s_megatron/sync_probe.py). Per model: the probe as a run
makes it, many times over, with the trainer in float32 and in the engine's type; then the same model some steps of AdamW
later, scored against an engine that did not get the new weights, and against one that did. Without --models, random
models of several widths and scales; with them, Hugging Face folders, whose tokenizer gets sums to do.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import torch
from bench_rollouts import build_model
from torch import Tensor

from d3s_megatron.actor.config import ActorConfig, OptimizerConfig
from d3s_megatron.actor.megatron_actor import MegatronActor
from d3s_megatron.actor.parallel import Layout, init_parallel, shutdown
from d3s_megatron.rollout import RolloutConfig, Sampling, make_requests
from d3s_megatron.rollout.make import make_engine
from d3s_megatron.sync_probe import PROBES
from d3s_megatron.types import Prompt, Rollout, Sample

Score = Callable[[Sequence[Rollout]], list[Tensor]]  # log-probs [L] of every answer

NUM_PROBES = 10
PROMPT_TOKENS = 24
RANDOM_MODELS = (  # hidden units, layers, vocabulary, standard deviation of the weights
    (128, 2, 512, 0.02),
    (128, 2, 512, 0.2),
    (512, 8, 4096, 0.02),
    (512, 8, 4096, 0.06),
)


def random_model(folder: Path, hidden: int, layers: int, vocab: int, std: float) -> Path:
    """A random model whose matrices have that deviation; the larger, the surer it is of its next token."""
    sizes = {"vocab": vocab, "hidden": hidden, "layers": layers, "head_size": 64, "prompt": 64, "tokens": 64}
    build_model(folder, argparse.Namespace(**sizes, dtype="float32"))
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, std)
    model.save_pretrained(folder)
    return folder


def prompts_for(folder: Path, num: int) -> list[Prompt]:
    """Prompts of ids at random for a random model, and sums for one that was trained."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    generator = torch.Generator().manual_seed(1)
    draw = torch.randint(1, 100, (num, PROMPT_TOKENS), generator=generator).tolist()
    if tokenizer.chat_template:
        texts = [f"What is {row[0]} plus {row[1]}, minus {row[2]}? Think step by step." for row in draw]
        draw = [
            tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)["input_ids"]
            for text in texts
        ]
    return [Prompt(str(i), "", tuple(ids), "") for i, ids in enumerate(draw)]


def actor_score(folder: Path, dtype: str, layout: Layout) -> Score:
    """The trainer's own scoring."""
    actor = MegatronActor(folder, ActorConfig(dtype=dtype), OptimizerConfig(), layout, 1.0, 1)

    def score(rollouts: Sequence[Rollout]) -> list[Tensor]:
        samples = [Sample(i, r.request.prompt.token_ids, r.token_ids, r.log_probs, 0.0) for i, r in enumerate(rollouts)]
        return [one.old_log_probs for one in actor.score(samples)]

    return score


def log_probs_of(model, rollout: Rollout) -> Tensor:
    """Log-probs [L] by a transformers model, with a graph where gradients are on."""
    prompt, answer = list(rollout.request.prompt.token_ids), torch.tensor(rollout.token_ids)
    logits = model(torch.tensor([prompt + answer.tolist()])).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, answer[:, None])[:, 0]


def differences(probes: Sequence[Sequence[Rollout]], score: Score) -> list[Tensor]:
    """Absolute differences of the log-probs, nats, one tensor a probe."""
    with torch.no_grad():
        return [
            torch.cat([(s - torch.tensor(r.log_probs)).abs() for s, r in zip(score(p), p, strict=True)]) for p in probes
        ]


def show(name: str, small: list[Tensor], large: list[Tensor]) -> None:
    """A row: mean over all tokens, the largest probe of either size, the largest token."""
    mean, token = torch.cat(large).mean(), torch.cat(large).max()
    worst = [max(float(d.mean()) for d in ds) for ds in (small, large)]
    print(f"  {name:<44}{mean:>9.5f}{worst[0]:>12.5f}{worst[1]:>12.5f}{token:>9.4f}", flush=True)


def train(model, rollouts: Sequence[Rollout], num_steps: int, lr: float) -> None:
    """Policy gradients on the engine's answers with advantages of either sign."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(num_steps):
        optimizer.zero_grad()
        for i, rollout in enumerate(rollouts):
            (log_probs_of(model, rollout).mean() * (-1.0) ** i).backward()
        optimizer.step()


def measure(folder: Path, name: str, dtype: str) -> None:
    """The rows of one model."""
    from transformers import AutoModelForCausalLM

    (few, short), (many, long) = PROBES
    print(f"{name:<46}{'mean':>9}{f'{few} x {short}':>12}{f'{many} x {long}':>12}{'token':>9}", flush=True)
    prompts = prompts_for(folder, many * NUM_PROBES)
    config = RolloutConfig(engine="vllm", dtype=dtype, max_batch_size=64)
    longest = max(len(prompt.token_ids) for prompt in prompts) + long
    with closing(make_engine(folder, config, longest, "cpu", colocated=False)) as engine:

        def probes(num_prompts: int, num_tokens: int) -> list[list[Rollout]]:
            parts = [prompts[i * num_prompts : (i + 1) * num_prompts] for i in range(NUM_PROBES)]
            return [engine.generate(make_requests(part, 1, 0, -1), Sampling(1.0, num_tokens)) for part in parts]

        small, large = probes(few, short), probes(many, long)
        layout = init_parallel(ActorConfig())
        for kind in dict.fromkeys(("float32", dtype)):
            score = actor_score(folder, kind, layout)
            show(f"same weights, trainer in {kind}", differences(small, score), differences(large, score))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for num_steps, lr in ((1, 1e-6), (19, 1e-6), (20, 1e-5)):
            old = {key: value.detach().to(getattr(torch, dtype), copy=True) for key, value in model.named_parameters()}
            train(model, large[0][:4], num_steps, lr)
            new = {key: value.detach().to(getattr(torch, dtype)) for key, value in model.named_parameters()}
            changed = sum(int((new[key] != old[key]).sum()) for key in old) / sum(
                value.numel() for value in old.values()
            )
            what = f"{num_steps} more at lr {lr:g}"
            print(f"  {what}: {changed:.1%} of the {dtype} weights are others", flush=True)

            def score(rollouts: Sequence[Rollout]) -> list[Tensor]:
                return [log_probs_of(model, rollout) for rollout in rollouts]

            show("  engine keeps the first weights", differences(small, score), differences(large, score))
        engine.load_weights((key, value.detach()) for key, value in model.named_parameters())
        small, large = probes(few, short), probes(many, long)
        show("  engine has the new weights", differences(small, score), differences(large, score))
    shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", type=Path, default=[], help="folders; default: random models")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"), help="of the engine")
    args = parser.parse_args()
    for folder in args.models:
        measure(folder, folder.name, args.dtype)
    for sizes in () if args.models else RANDOM_MODELS:
        with tempfile.TemporaryDirectory() as made:
            name = "{} wide, {} layers, vocabulary {}, std {}".format(*sizes)
            measure(random_model(Path(made), *sizes), name, args.dtype)


if __name__ == "__main__":
    main()
