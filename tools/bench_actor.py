"""What selection saves in the actor's update, beside the same actor with the loss masked only, in one run.

    python tools/bench_actor.py selection     keep ratios x token shares: time, memory, and the FLOP count's prediction
    python tools/bench_actor.py packing       packed rows against rows padded to the longest sample
    python tools/bench_actor.py layouts       tokens per second of score and update per layout, with torchrun inside

The model is Qwen2-shaped with a real vocabulary and a small width, unless --model names a folder. On CPUs times are
the process's processor time on one thread, so that other load on the machine shows less. With a GPU they are wall
time, and MFU and peak memory are those of the device.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import logging
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from d3s_megatron.actor import megatron_actor
from d3s_megatron.actor.config import ActorConfig, OptimizerConfig
from d3s_megatron.actor.megatron_actor import MegatronActor
from d3s_megatron.actor.parallel import data_parallel_reduce, init_parallel, leave_layout, shutdown
from d3s_megatron.actor.passes import output_log_probs, update_pass
from d3s_megatron.algorithms.loss_batch import StepTensors
from d3s_megatron.algorithms.normalization import kept_counts, token_weights
from d3s_megatron.algorithms.policy_loss import METRICS, PolicyLoss
from d3s_megatron.convert import ModelShape
from d3s_megatron.doctor.layouts import parse_layout
from d3s_megatron.doctor.parity import launch
from d3s_megatron.types import Sample, Scores

LOSS = PolicyLoss("token", 0.2, 0.2, None, 0.0, "k3")
KEEP_RATIOS, TOKEN_SHARES = (1.0, 0.5, 0.25), (1.0, 0.4, 0.2, 0.1)
PEAK_TFLOPS = 989.0  # H100 and H200, dense bfloat16


def bench_model(folder: Path) -> Path:
    """Saves a random model of Qwen2's vocabulary in which the output layer has 54% of the matrix parameters."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=151_936,
        hidden_size=256,
        intermediate_size=5120,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def matrix_parameters(shape: ModelShape) -> tuple[int, int]:
    """(output layer, all layers together): the parameters that a token is multiplied with."""
    attention = shape.hidden_size * shape.head_dim * (2 * shape.num_heads + 2 * shape.num_kv_heads)
    return (
        shape.vocab_size * shape.hidden_size,
        shape.num_layers * (attention + 3 * shape.hidden_size * shape.ffn_size),
    )


def make_samples(num_tokens: int, longest: int, vocab_size: int, seed: int = 0) -> list[Sample]:
    """About `num_tokens` in samples of 16 prompt tokens and answers with the long tail of reasoning answers."""
    generator = torch.Generator().manual_seed(seed)
    samples: list[Sample] = []
    while num_tokens > 0:
        spread = float(torch.randn((), generator=generator))
        length = max(4, min(longest, int(longest / 4 * 2.0**spread)))
        ids = tuple(torch.randint(0, vocab_size, (16 + length,), generator=generator).tolist())
        samples.append(Sample(len(samples), ids[:16], ids[16:], (-1.0,) * length, 1.0 - 2.0 * (len(samples) % 2)))
        num_tokens -= len(ids)
    return samples


@dataclass(frozen=True)
class Cost:
    """What one update took."""

    seconds: float  # of forward and backward; the optimizer's step depends on nothing that is measured here
    peak: int  # bytes above what was held before it
    kept: int  # tokens


def measure(actor: MegatronActor, samples: Sequence[Sample], keep: Sequence[Tensor]) -> Cost:
    """One update on these samples; those without a kept token take part only where the actor masks."""
    old = [torch.full((len(mask),), -12.0) for mask in keep]
    scores = [Scores(values, values, None) for values in old]
    counts = data_parallel_reduce(actor.layout)(kept_counts(keep), "sum")
    weights = token_weights("token_mean", keep, 4096, counts)
    tensors = StepTensors(samples, scores, keep, keep, weights, weights)
    device, spent = actor.layout.device, []

    def timed_pass(*args):
        start = clock()
        result = update_pass(*args)
        spent.append(clock() - start)
        return result

    memory = PeakMemory(device)
    with replaced(megatron_actor, "update_pass", timed_pass):
        actor.update(samples, keep, lambda row: tensors.loss_batch(row, device), LOSS, len(METRICS))
    return Cost(spent[0], memory.peak(), sum(int(mask.sum()) for mask in keep))


@contextlib.contextmanager
def replaced(place: Any, name: str, value: Any) -> Iterator[None]:
    """Has another value there for a while."""
    right = getattr(place, name)
    setattr(place, name, value)
    try:
        yield
    finally:
        setattr(place, name, right)


def clock() -> float:
    """Seconds: of the processor on CPUs, of the wall once the device is done on GPUs."""
    if not torch.cuda.is_available():
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def return_freed_memory() -> None:
    """Has the C library return blocks from 64 KiB on when they are freed: slower, but then peaks are those in use."""
    if not torch.cuda.is_available():
        m_mmap_threshold = -3
        ctypes.CDLL(None).mallopt(m_mmap_threshold, 64 * 1024)


class PeakMemory:
    """Largest memory since it was made, above what was held then."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cpu":
            Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again
        else:
            torch.cuda.reset_peak_memory_stats()
        self.before = self._read("VmRSS")

    def _read(self, field: str) -> int:
        if self.device.type != "cpu":
            held = torch.cuda.max_memory_allocated if field == "VmHWM" else torch.cuda.memory_allocated
            return held()
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
        return int(line.split()[1]) * 1024

    def peak(self) -> int:
        """Bytes."""
        return self._read("VmHWM") - self.before


def masks(samples: Sequence[Sample], keep_ratio: float, share: float) -> list[Tensor]:
    """Kept tokens: every (1 / keep_ratio)-th sample, in those a random share; none in the others."""
    generator = torch.Generator().manual_seed(1)
    every = round(1 / keep_ratio)
    out = []
    for i, sample in enumerate(samples):
        order = torch.rand(len(sample.response_ids), generator=generator).argsort().argsort()
        kept = i % every == 0
        out.append(order < max(1, round(share * len(sample.response_ids))) if kept else order < 0)
    return out


def make_actor(model: str, **config) -> MegatronActor:
    """The actor, in whatever layout its settings name; logits always fit."""
    config = ActorConfig(**({"max_logits_mb": 2**16} | config))
    return MegatronActor(model, config, OptimizerConfig(lr=0.0), init_parallel(config), 1.0, 10)


def selection(model: str, num_tokens: int, repeats: int, dtype: str, time_only: bool = False) -> None:
    """Prints the tables: updates and output layers beside masking, all measured in turn."""
    ours = make_actor(model, dtype=dtype)
    leave_layout()
    masking = make_actor(model, dtype=dtype, gather_rows=False, truncate_samples=False, share_prompts=False)
    head, layers = matrix_parameters(ours.shape)
    head_share = head / (head + layers)
    samples = make_samples(num_tokens, num_tokens // 4, ours.shape.vocab_size)
    total = sum(len(s.prompt_ids) + len(s.response_ids) - 1 for s in samples)
    cells = {(f, rho): masks(samples, f, rho) for f in KEEP_RATIOS for rho in TOKEN_SHARES}

    def of_cell(cell: tuple[float, float]) -> Cost:
        picked = [i for i, mask in enumerate(cells[cell]) if mask.any()]
        return measure(ours, [samples[i] for i in picked], [cells[cell][i] for i in picked])

    def of_masking() -> Cost:
        return measure(masking, samples, cells[1.0, 1.0])

    def of_one_token(actor: MegatronActor) -> float:
        one = replace(samples[0], response_ids=samples[0].response_ids[:1], rollout_log_probs=(-1.0,))
        return measure(actor, [one], [torch.ones(1, dtype=torch.bool)]).seconds

    of_one_token(masking)  # the first update of each makes what later ones find
    constant = statistics.median([of_one_token(ours) for _ in range(6)][1:])
    # Everything in turn, so that a machine that is slow for a while is slow for all.
    seconds: dict = {cell: [] for cell in cells}
    of_masks = []
    for _ in range(repeats):
        for cell in cells:
            if cell[1] == TOKEN_SHARES[0]:
                of_masks.append(of_masking().seconds)
            seconds[cell].append(of_cell(cell).seconds)
    of_masks.append(of_masking().seconds)
    base = statistics.median(of_masks)
    full_peak = 0
    if not time_only:
        return_freed_memory()
        full_peak = of_masking().peak
    print(f"output layer {head_share:.1%} of {(head + layers) / 1e6:.1f}M matrix parameters; {total} tokens, {dtype}")
    print(
        f"masking: {base:.2f} s ({min(of_masks):.2f} to {max(of_masks):.2f}), peak {full_peak / 2**20:.0f} MiB"
        + mfu(ours, base, total)
    )
    print(
        f"an update of one kept token: {constant:.2f} s, {constant / base:.1%} of masking, which the count leaves out"
    )
    print(
        "| tokens in rows | rho | time / masking | from, to | by FLOPs | off by | and less one token's time |", end=""
    )
    print("" if time_only else " peak / masking | logits, MiB |")
    print("|---|---|---|---|---|---|---|" + ("" if time_only else "---|---|"))
    for (f, rho), keep in cells.items():
        spans = [len(s.prompt_ids) + int(m.nonzero()[-1]) for s, m in zip(samples, keep, strict=True) if m.any()]
        kept = sum(int(mask.sum()) for mask in keep)
        predicted = ((1 - head_share) * sum(spans) + head_share * kept) / total
        spent = seconds[f, rho]
        ratio, less = statistics.median(spent) / base, (statistics.median(spent) - constant) / (base - constant)
        print(
            f"| {sum(spans) / total:.2f} | {rho} | {ratio:.3f} | {min(spent) / base:.3f}, {max(spent) / base:.3f} "
            f"| {predicted:.3f} | {ratio / predicted - 1:+.1%} | {less / predicted - 1:+.1%} |",
            end="",
        )
        if not time_only:
            logits = kept * ours.shape.vocab_size * (4 if dtype == "float32" else 2) / 2**20
            print(f" {of_cell((f, rho)).peak / full_peak:.2f} | {logits:.0f} |", end="")
        print(mfu(ours, ratio * base, predicted * total))
    output_layer(ours, total, repeats)


def mfu(actor: MegatronActor, seconds: float, num_tokens: float) -> str:
    """Share of the GPU's peak that the matrix products took; nothing on CPUs."""
    if actor.layout.device.type == "cpu":
        return ""
    return f" MFU {6 * sum(matrix_parameters(actor.shape)) * num_tokens / seconds / PEAK_TFLOPS / 1e12:.1%}"


def output_layer(actor: MegatronActor, num_rows: int, repeats: int) -> None:
    """Prints what the output layer, softmax and log-probs cost, forward and backward, against all rows."""
    weight = actor.chunks[-1].output_weight().detach().requires_grad_()
    states = torch.randn(num_rows, actor.shape.hidden_size, dtype=weight.dtype, device=weight.device)
    targets = torch.randint(0, actor.shape.vocab_size, (num_rows,), device=weight.device)
    buffer = torch.zeros(weight.shape, device=weight.device)

    def once(share: float) -> float:
        num = round(share * num_rows)
        rows = states[:num].clone().requires_grad_()
        start = clock()
        output_log_probs(rows, weight, targets[:num], actor.head, buffer)[0].sum().backward()
        return clock() - start

    rounds = [{share: once(share) for share in TOKEN_SHARES} for _ in range(repeats + 1)][1:]
    best = {share: min(round_[share] for round_ in rounds) for share in TOKEN_SHARES}
    print("\n| rho | output layer / that of all rows |\n|---|---|")
    for share in TOKEN_SHARES:
        print(f"| {share} | {best[share] / best[1.0]:.3f} |")


def packing(model: str, num_tokens: int, repeats: int, dtype: str) -> None:
    """Prints the update of packed samples against that of samples padded to the longest one."""
    actor = make_actor(model, dtype=dtype, truncate_samples=False)
    samples = make_samples(num_tokens, num_tokens // 4, actor.shape.vocab_size)
    longest = max(len(s.response_ids) for s in samples)
    keep = masks(samples, 1.0, 0.2)
    fill = [longest - len(s.response_ids) for s in samples]
    padded = [
        replace(s, response_ids=s.response_ids + (0,) * n, rollout_log_probs=(-1.0,) * longest)
        for s, n in zip(samples, fill, strict=True)
    ]
    none = [torch.cat([mask, torch.zeros(n, dtype=torch.bool)]) for mask, n in zip(keep, fill, strict=True)]
    rounds = [(measure(actor, samples, keep).seconds, measure(actor, padded, none).seconds) for _ in range(repeats + 1)]
    packed, with_padding = (min(column) for column in zip(*rounds[1:], strict=True))
    tokens = [sum(len(s.prompt_ids) + len(s.response_ids) for s in which) for which in (samples, padded)]
    print(
        f"packed {tokens[0]} tokens in {packed:.2f} s, padded {tokens[1]} in {with_padding:.2f} s: "
        f"time {packed / with_padding:.2f}, tokens {tokens[0] / tokens[1]:.2f}"
    )


def layout(model: str, num_tokens: int, repeats: int, dtype: str, name: str) -> None:
    """One layout's line, in a process that torchrun started; wall time, as ranks wait for one another."""
    actor = make_actor(model, dtype=dtype, **parse_layout(name).actor)
    place = actor.layout
    samples = make_samples(num_tokens, num_tokens // 4, actor.shape.vocab_size)[place.dp_rank :: place.dp_size]
    keep = masks(samples, 1.0, 0.2)
    best = [float("inf")] * 2
    for _ in range(repeats + 1):
        start = time.perf_counter()
        actor.score(samples)
        middle = time.perf_counter()
        measure(actor, samples, keep)
        best = [min(best[0], middle - start), min(best[1], time.perf_counter() - middle)]
    if place.rank == 0:
        print(f"| {name} | {place.world_size} | {num_tokens / best[0]:.0f} | {num_tokens / best[1]:.0f} |")
    shutdown()


def layouts(args: argparse.Namespace, model: str) -> None:
    """Prints tokens per second of every layout named."""
    print("| layout | processes | score, tokens/s | update at rho 0.2, tokens/s |\n|---|---|---|---|")
    for name in args.layouts.split(","):
        settings = [
            "--model",
            model,
            "--tokens",
            str(args.tokens),
            "--repeats",
            str(args.repeats),
            "--dtype",
            args.dtype,
        ]
        done = launch([str(Path(__file__)), "layout", "--layouts", name, *settings], parse_layout(name).num_processes)
        print(done.stdout.strip() if done.returncode == 0 else f"| {name} | failed: {done.stderr[-300:]} |")


def main(argv: Sequence[str]) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("selection", "packing", "layouts", "layout"))
    parser.add_argument("--model", help="Hugging Face folder; a random model where not given")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--time-only", action="store_true", help="selection: no second round for peak memory")
    parser.add_argument("--layouts", default="tp1,tp2,pp2,dp2,tp2sp")
    args = parser.parse_args(argv)
    if args.what != "layouts":
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        model = args.model or str(bench_model(Path(scratch)))
        common = (model, args.tokens, args.repeats, args.dtype)
        if args.what == "layouts":
            layouts(args, model)
        elif args.what == "layout":
            layout(*common, args.layouts)
        elif args.what == "packing":
            packing(*common)
            shutdown()
        else:
            selection(*common, args.time_only)
            shutdown()


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    main(sys.argv[1:])
