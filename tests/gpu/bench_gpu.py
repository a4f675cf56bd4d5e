"""Times of the ops on one GPU as a small JSON: `python tests/gpu/bench_gpu.py OUT.json`; medians of event times."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch

from d3s_megatron import ops
from d3s_megatron.ops import extension


def milliseconds(job: Callable[[], Any], rounds: int = 20) -> float:
    """Median time of a job on the device, after three warm-up calls."""
    times = []
    for turn in range(rounds + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        job()
        end.record()
        end.synchronize()
        if turn >= 3:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def bench_logits(g: torch.Generator) -> list[dict[str, Any]]:
    """Score and train at T 8192, V 151,936, BF16."""
    num, vocab = 8192, 151_936
    x = torch.randn(num, vocab, generator=g, device="cuda", dtype=torch.bfloat16)
    y, grad = torch.randint(0, vocab, (num,), generator=g, device="cuda"), torch.ones(num, device="cuda")

    def score() -> None:
        with torch.no_grad():
            ops.logprob_entropy(x, y)

    def train() -> None:
        leaf = x.detach().requires_grad_()
        lp, _ = ops.logprob_entropy(leaf, y, overwrite_logits=True)
        torch.autograd.grad(lp, leaf, grad)

    size = f"T={num} V={vocab} BF16"
    return [
        {"op": "score", "size": size, "ms": milliseconds(score), "goal_ms": 0.60},
        {"op": "forward and backward", "size": size, "ms": milliseconds(train), "goal_ms": 1.8},
    ]


def bench_head(g: torch.Generator) -> list[dict[str, Any]]:
    """The fused head's forward at H 4096."""
    num, width, vocab = 8192, 4096, 151_936
    hidden = torch.randn(num, width, generator=g, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(vocab, width, generator=g, device="cuda", dtype=torch.bfloat16).mul_(0.02)
    y = torch.randint(0, vocab, (num,), generator=g, device="cuda")
    with torch.no_grad():
        ms = milliseconds(lambda: ops.linear_logprob(hidden, weight, y, tile=2048), 5)
    teraflops = 2 * num * width * vocab / ms / 1e9
    return [{"op": "fused head forward", "size": f"H={width}", "ms": ms, "tflops": teraflops, "goal_tflops": 700}]


def bench_selections(g: torch.Generator) -> list[dict[str, Any]]:
    """Top share of 8.4 M scores and max variance of 16,384 values."""
    n = 8_400_000
    scores = torch.rand(n, generator=g, device="cuda") * (torch.rand(n, generator=g, device="cuda") > 0.1)
    uid, position = torch.arange(n, device="cuda") // 8192, torch.arange(n, device="cuda") % 8192
    share = milliseconds(lambda: ops.top_share(scores, 0.2, uid, position))
    values = torch.randn(16_384, generator=g, device="cuda", dtype=torch.float64)
    key = torch.arange(16_384, device="cuda")
    variance = milliseconds(lambda: ops.max_variance_subset(values, 8192, key))
    return [
        {"op": "top share", "size": f"n={n}", "ms": share, "goal_ms": 0.06},
        {"op": "max variance", "size": "n=16384", "ms": variance, "goal_ms": 0.05},
    ]


def main(out: str) -> None:
    """Measure what the goals name and write it down."""
    g = torch.Generator(device="cuda").manual_seed(0)
    rows = [*bench_logits(g), *bench_head(g), *bench_selections(g)]
    ext = extension.module()
    state = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "ops": dict(ext.state()) if ext else None}
    with open(out, "w") as f:
        json.dump({"state": state, "rows": rows}, f, indent=1)
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main(sys.argv[1])
