"""Benchmark the ops beside the methods others use, in one run: `python tools/bench_ops.py [--large] [--json FILE]`.

CPU seconds of all threads, medians of interleaved rounds (A B C, A B C, ...), so that whoever shares the machine slows
all alike; peak extra bytes are peak minus present resident memory. The rivals' methods are written afresh here.
A "top share, 2 ranks" row is wall time. --large adds the rows with 1e8 scores (4 GB of memory).
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # a thread that spins for work would count as CPU time

import argparse
import ctypes
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from d3s_megatron import ops

Job = Callable[[], Any]


@dataclass(frozen=True)
class Row:
    """One comparison; `ratio` is rival / ours, or ours / rival where the rival is a floor; goals likewise."""

    op: str
    size: str
    ours: float
    rival: float
    ratio: float
    extra_bytes: float  # per logit or score, ours
    against: str
    goal: str
    met: bool


def peak_extra(job: Job) -> int:
    """Bytes of resident memory a job needs beyond what is there when it starts; Linux only, else 0."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/clear_refs", "w") as f:
            f.write("5")
    except (OSError, AttributeError):
        return 0
    before = _status("VmRSS")
    out = job()
    peak = _status("VmHWM")
    del out
    return max(0, peak - before)


def _status(field: str) -> int:
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith(field + ":"))


def interleaved(jobs: dict[str, Job], rounds: int, before: Job | None = None) -> dict[str, float]:
    """Median CPU seconds of every job, after one untimed round."""
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(rounds + 1):
        for name, job in jobs.items():
            if before:
                before()
            start = time.process_time()
            out = job()
            took = time.process_time() - start
            del out
            if turn:
                seconds[name].append(took)
    return {name: statistics.median(s) for name, s in seconds.items()}


def against(
    op: str, size: str, times: dict[str, float], goals: dict[str, float], extra: float, limit: float
) -> list[Row]:
    """Rows of ours against every rival with a goal ("at least goal times less CPU", extra bytes at most limit)."""
    rows = []
    for rival, goal in goals.items():
        ratio = times[rival] / times["ours"]
        met = ratio >= goal and extra <= limit
        rows.append(
            Row(op, size, times["ours"], times[rival], ratio, extra, rival, f">= {goal:g} x, <= {limit:g} B", met)
        )
    return rows


# ---- rivals: log-prob and entropy from logits ----


def megatron_log_prob(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Vocabulary-parallel cross entropy as Megatron does it: in place, sweep by sweep; softmax is kept for backward."""
    x -= x.max(-1).values[:, None]
    picked = x.gather(1, y[:, None])[:, 0].clone()
    torch.exp(x, out=x)
    z = x.sum(-1)
    x.div_(z[:, None])
    return picked - z.log(), x


def verl(x: Tensor, y: Tensor, grad: Tensor | None) -> Any:
    """float32 copy, division by the temperature, clone, entropy in six sweeps, then Megatron's cross entropy."""
    x = x.float() if x.dtype != torch.float32 else x * 1.0
    x.div_(1.0)
    copy = x.clone()
    m = x.max(-1, keepdim=True).values
    e = (x - m).exp_()
    z = e.sum(-1, keepdim=True)
    p = e.div_(z)
    h = (m + z.log())[:, 0] - torch.einsum("tv,tv->t", p, x)
    lp, softmax = megatron_log_prob(copy, y)
    if grad is None:
        return lp, h
    del m, e, z
    softmax[torch.arange(len(y)), y] -= 1.0
    return lp, h, softmax.mul_(grad[:, None])


def slime(x: Tensor, y: Tensor, grad: Tensor | None) -> Any:
    """One softmax buffer shared by log-prob, entropy and backward."""
    x = x.float()
    m = x.max(-1, keepdim=True).values
    e = x - m
    picked = e.gather(1, y[:, None])[:, 0]
    e.exp_()
    z = e.sum(-1, keepdim=True)
    p = e.div_(z)
    h = (m + z.log())[:, 0] - torch.einsum("tv,tv->t", p, x)
    lp = picked - z.log()[:, 0]
    if grad is None:
        return lp, h
    d = p.neg_()
    d[torch.arange(len(y)), y] += 1.0
    return lp, h, d.mul_(grad[:, None])


def log_softmax(x: Tensor, y: Tensor, grad: Tensor | None) -> Any:
    """The textbook: a float32 log-softmax, its exponential, their product."""
    lp = x.float().log_softmax(-1)
    return lp.gather(1, y[:, None])[:, 0], -(lp.exp() * lp).sum(-1)


def bench_logits(rounds: int) -> list[Row]:
    """Score and train rows at T 384, V 151,936, BF16."""
    num, vocab = 384, 151_936
    g = torch.Generator().manual_seed(0)
    x = torch.randn(num, vocab, generator=g).mul_(2.0)
    x[torch.arange(num), torch.randint(0, vocab, (num,), generator=g)] += torch.rand(num, generator=g) * 24
    x, y, grad = x.bfloat16(), torch.randint(0, vocab, (num,), generator=g), torch.randn(num, generator=g)
    size = f"T={num} V={vocab} BF16"

    def score() -> Any:
        with torch.no_grad():
            return ops.logprob_entropy(x, y)

    peers: dict[str, Job] = {"verl": lambda: verl(x, y, None), "slime": lambda: slime(x, y, None),
                             "log_softmax": lambda: log_softmax(x, y, None)}  # fmt: skip
    score()  # the first call's libraries and thread stacks are not the op's
    extra = peak_extra(score) / x.numel()
    times = interleaved({"ours": score, **peers}, rounds)
    rows = against("score", size, times, {"verl": 16}, extra, 0.05)
    best = min(("slime", "log_softmax"), key=times.__getitem__)
    rows += against("score", size, times, {best: 8}, extra, 0.05)

    work = x.clone()

    def train() -> Any:
        leaf = work.detach().requires_grad_()
        lp, h = ops.logprob_entropy(leaf, y, overwrite_logits=True)
        return torch.autograd.grad(lp, leaf, grad), h

    train()  # warm: autograd's own first-call memory is not the op's
    work.copy_(x)
    extra = peak_extra(train) / x.numel()
    times = interleaved(
        {"ours": train, "verl": lambda: verl(work, y, grad), "slime": lambda: slime(work, y, grad)},
        rounds,
        before=lambda: work.copy_(x),
    )
    return rows + against("log-prob forward and backward", size, times, {"verl": 10, "slime": 6}, extra, 0.05)


def bench_entropy() -> list[Row]:
    """Relative error of the entropy where it is at least 1e-6, at three offsets of the logits."""
    rows = []
    for offset in (-100.0, 0.0, 100.0):
        g = torch.Generator().manual_seed(1)
        x = torch.randn(2048, 4096, generator=g)
        x[torch.arange(2048), torch.randint(0, 4096, (2048,), generator=g)] += torch.linspace(0, 34, 2048)
        x += offset
        exact = x.double().log_softmax(-1)
        want = -(exact.exp() * exact).sum(-1)
        h = ops.logprob_entropy(x, torch.zeros(2048, dtype=torch.int64))[1].double()
        m, z = x.max(-1).values, (x - x.max(-1, keepdim=True).values).exp().sum(-1)
        usual = (m + z.log() - (x.softmax(-1) * x).sum(-1)).double()  # max + log Z - sum p x
        sure = want >= 1e-6
        error = ((h - want).abs() / want)[sure].max().item()
        theirs = ((usual - want).abs() / want)[sure].max().item()
        met = error <= 1e-6 and bool(h.min() >= 0)
        rows.append(Row("entropy, relative error", f"offset {offset:+.0f}", error, theirs, theirs / error, 0.0,
                        "max + log Z - sum p x", "<= 1e-6, never < 0", met))  # fmt: skip
    return rows


# ---- the head ----


def bench_head(rounds: int) -> list[Row]:
    """linear_logprob forward and backward against the four matrix products it cannot avoid."""
    num, width, vocab = 1024, 512, 65_536
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(num, width, generator=g), torch.randn(vocab, width, generator=g) * 0.05
    y, grad = torch.randint(0, vocab, (num,), generator=g), torch.randn(num, generator=g)
    d_weight = torch.zeros_like(weight)
    x, xt = torch.empty(num, vocab), torch.empty(vocab, num)

    def ours() -> Any:
        h, w = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        lp, entropy = ops.linear_logprob(h, w, y, weight_grad=d_weight)
        return torch.autograd.grad(lp, h, grad), entropy

    def products() -> None:
        torch.mm(hidden, weight.t())
        torch.mm(hidden, weight.t())
        torch.mm(x, weight)
        torch.mm(xt, hidden)

    ours()
    extra = max(0, peak_extra(ours) - hidden.numel() * 4) / (num * vocab)
    times = interleaved({"ours": ours, "products": products}, rounds)
    ratio = times["ours"] / times["products"]
    return [Row("fused head, forward and backward", f"T={num} H={width} V={vocab} FP32", times["ours"],
                times["products"], ratio, extra, "its four GEMMs", "<= 1.05 x, <= 0.1 B",
                ratio <= 1.05 and extra <= 0.1)]  # fmt: skip


# ---- selections ----


def make_scores(n: int, seed: int = 0) -> Tensor:
    """|A| * H as training makes them: advantages of 16 binary rewards (some groups all equal: 0), skewed entropies."""
    g = torch.Generator().manual_seed(seed)
    h = (torch.randn(n, generator=g) * 2.2 - 2.5).exp_().clamp_max_(11.5)
    groups = max(1, n // 2048 // 16)
    right = torch.randint(0, 17, (groups,), generator=g)
    r = (torch.arange(16)[None] < right[:, None]).float()
    a = ((r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-6)).flatten().abs()
    return h.mul_(a.repeat_interleave(-(-n // (16 * groups)))[:n])


def topk_mask(x: Tensor, k: int) -> Tensor:
    mask = torch.zeros(len(x), dtype=torch.bool)
    mask[torch.topk(x, k).indices] = True
    return mask


def partition_mask(x: Tensor, k: int) -> Tensor:
    a = x.numpy()
    return torch.from_numpy(a >= np.partition(a, a.size - k)[a.size - k])


def bench_top_share(n: int, rounds: int) -> list[Row]:
    """One process, rho = 0.2."""
    x, uid, position = make_scores(n), torch.zeros(n, dtype=torch.int64), torch.arange(n)
    k = ops.num_top(0.2, n)
    ours: Job = lambda: ops.top_share(x, 0.2, uid, position)  # noqa: E731
    assert int(ours().sum()) == k
    extra = peak_extra(ours) / n
    jobs: dict[str, Job] = {"ours": ours, "torch.topk": lambda: topk_mask(x, k),
                            "numpy.partition": lambda: partition_mask(x, k)}  # fmt: skip
    times = interleaved(jobs, rounds)
    return against("top share", f"n={n:.0e}", times, {"torch.topk": 60, "numpy.partition": 8}, extra, 2.0)


def bench_two_ranks(n: int, rounds: int) -> list[Row]:
    """Two gloo processes with half of the scores each: wall seconds."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_two_ranks, (n, rounds, folder), nprocs=2)
        with open(f"{folder}/out.json") as f:
            wall, moved, extra = json.load(f)
    rows = []
    for rival, goal in (("gather + topk", 100), ("gather + partition", 30)):
        ratio = wall[rival] / wall["ours"]
        rows.append(Row(f"top share, 2 ranks, {moved / 1024:.0f} KB moved", f"n={n:.0e}", wall["ours"], wall[rival],
                        ratio, extra, rival, f">= {goal} x wall, <= 192 KB",
                        ratio >= goal and moved <= 192 * 1024))  # fmt: skip
    return rows


def _two_ranks(rank: int, n: int, rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    half = n // 2
    x, k, moved = make_scores(n)[rank * half : (rank + 1) * half].clone(), ops.num_top(0.2, n), 0
    uid, position = torch.full((half,), rank), torch.arange(half)
    kinds = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

    def reduce(tensor: Tensor, how: str) -> Tensor:
        nonlocal moved
        moved += tensor.numel() * tensor.element_size()  # of a ring: 2 (P - 1) / P of the bytes, sent and received
        dist.all_reduce(tensor, kinds[how])
        return tensor

    def gathered(pick: Callable[[Tensor, int], Tensor]) -> Tensor:
        everyone = torch.empty(n)
        dist.all_gather_single(everyone, x)
        return pick(everyone, k)[rank * half : (rank + 1) * half]

    jobs: dict[str, Job] = {
        "ours": lambda: ops.top_share(x, 0.2, uid, position, reduce),
        "gather + topk": lambda: gathered(topk_mask),
        "gather + partition": lambda: gathered(partition_mask),
    }
    wall: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(rounds + 1):
        for name, job in jobs.items():
            dist.barrier()
            moved, start = (0 if name == "ours" else moved), time.perf_counter()
            out = job()
            dist.barrier()
            if turn:
                wall[name].append(time.perf_counter() - start)
            if name == "ours":
                count = out.sum()
                dist.all_reduce(count)
                assert int(count) == k
                sent = moved
            del out
    extra = peak_extra(jobs["ours"]) / n
    if rank == 0:
        with open(f"{folder}/out.json", "w") as f:
            json.dump([{name: statistics.median(w) for name, w in wall.items()}, sent, extra], f)
    dist.barrier()
    dist.destroy_process_group()


def pods_loop(values: Tensor, m: int) -> Tensor:
    """PODS' vectorised loop: one gather, one variance and one host sync for every split."""
    r = values.float()[None]
    order = r.argsort(dim=1, descending=True)
    best = order[:, :m].clone()
    variance = r.gather(1, best).var(dim=1)
    for i in range(m):
        candidate = torch.cat([order[:, :i], order[:, i - m :]], dim=1)
        w = r.gather(1, candidate).var(dim=1)
        better = w > variance
        if better.any():
            variance[better], best[better] = w[better], candidate[better]
    return best[0]


def sort_and_prefix(values: Tensor, m: int) -> np.ndarray:
    """argsort and prefix sums in numpy: exact, n log n."""
    a = values.numpy()
    order = np.argsort(a, kind="stable")
    x = a[order] - a[order[0]]
    one, two = np.concatenate([[0], np.cumsum(x)]), np.concatenate([[0], np.cumsum(x * x)])
    k, n = np.arange(m + 1), len(x)
    s, ss = one[m - k] + one[n] - one[n - k], two[m - k] + two[n] - two[n - k]
    k = int(np.argmax(m * ss - s * s))
    return np.concatenate([order[: m - k], order[n - k :]])


def bench_max_variance(n: int, rounds: int) -> list[Row]:
    """m = n / 2 of rewards-like values; PODS' loop only where it ends this day."""
    m, g = n // 2, torch.Generator().manual_seed(n)
    values = (torch.randn(n, generator=g) + 3 * (torch.rand(n, generator=g) < 0.3)).double()
    key = torch.arange(n)
    ours: Job = lambda: ops.max_variance_subset(values, m, key)  # noqa: E731
    extra = peak_extra(ours) / n
    many = 20 if n < 100_000 else 1  # short jobs are repeated: the clock's steps are not the op's
    jobs: dict[str, Job] = {"ours": ours, "sort + prefix sums": lambda: sort_and_prefix(values, m)}
    times = interleaved({name: (lambda job=job: [job() for _ in range(many)]) for name, job in jobs.items()}, rounds)
    times = {name: t / many for name, t in times.items()}
    goals = {"sort + prefix sums": 8.0}
    if n <= 8192:
        times["PODS loop"] = interleaved({"PODS": lambda: pods_loop(values, m)}, 1)["PODS"]
        goals = {"PODS loop": 700.0, **goals}
    return against("max variance", f"n={n} m={m}", times, goals, extra, float("inf"))


def table(rows: list[Row]) -> str:
    """A Markdown table of the rows."""
    lines = [
        "| op | size | ours | rival | against | ratio | extra B each | goal | met |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        lines.append(
            f"| {r.op} | {r.size} | {r.ours:.3g} | {r.rival:.3g} | {r.against} | {r.ratio:.3g} | {r.extra_bytes:.2f} "
            f"| {r.goal} | {'yes' if r.met else 'NO'} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--large", action="store_true", help="the rows with 1e8 scores too")
    parser.add_argument("--only", default="", help="score, entropy, head, share, ranks or variance")
    parser.add_argument("--json", default="", help="write the rows to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    sizes = [10**7] + [10**8] * args.large
    jobs: list[tuple[str, Callable[[], list[Row]]]] = [
        ("score", lambda: bench_logits(args.rounds)),
        ("entropy", bench_entropy),
        ("head", lambda: bench_head(args.rounds)),
        *(("share", lambda n=n: bench_top_share(n, args.rounds)) for n in sizes),
        ("ranks", lambda: bench_two_ranks(sizes[-1], min(3, args.rounds))),
        ("variance", lambda: bench_max_variance(8192, args.rounds)),
        ("variance", lambda: bench_max_variance(10**7, min(3, args.rounds))),
    ]
    rows = [row for name, job in jobs if args.only in ("", name) for row in job()]
    print(table(rows))
    if args.json:
        with open(args.json, "w") as f:
            json.dump([asdict(row) for row in rows], f, indent=1)


if __name__ == "__main__":
    main()
