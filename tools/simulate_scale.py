"""Selection, packing and scheduling of one step alone, without a model: does it stay small on 1,024 ranks?

    python tools/simulate_scale.py --model Llama-3.1-70B --ranks 1024 --tokens 1e9

A batch of that many response tokens with long-tailed lengths goes through the package's own code: group advantages,
selection over the whole batch, balance over the data-parallel ranks, bins of micro-batches, and the selection of the
exact top share of tokens in as many threads as there are data-parallel ranks, with real reductions between them, one
thread computing at a time; its time is that of the slowest of as many ranks as fit here with shards of their real size.
What is measured here is marked m: processor seconds on one core. What would not fit here is modelled, marked ~:

    what grows by tokens      its measured seconds of a token x the tokens of a rank there
    a reduction of b bytes    2 log2(R) alpha + 2 b / bandwidth, up and down a tree; alpha and bandwidth are assumed
    a gather of b bytes       log2(R) alpha + b / bandwidth
    a step                    the planner's, for this model, batch and number of GPUs

Balance is shown as largest over mean of the data-parallel ranks, where rollouts were made (before) and after they are
shared out; cost adds attention's square to the tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from simulate_top_share import TopShareRun, run_top_share, timed
from torch import Tensor

from d3s_megatron import ops
from d3s_megatron.actor.config import ActorConfig
from d3s_megatron.actor.exchange import plan_shares, share_out
from d3s_megatron.actor.packing import cost, pack
from d3s_megatron.actor.parallel import init_parallel, shutdown
from d3s_megatron.algorithms.config import AlgorithmConfig
from d3s_megatron.algorithms.metrics import selection_metrics
from d3s_megatron.algorithms.recipes import make_recipe
from d3s_megatron.evaluate import rank_share
from d3s_megatron.plan.cost import Machine, Work
from d3s_megatron.plan.memory import Layout
from d3s_megatron.plan.models import MODELS, shape_of
from d3s_megatron.plan.search import Fixed, Plan, Rollouts, best
from d3s_megatron.types import Experience, Prompt, Request, Rollout

GOAL = 0.001  # selection's largest share of a step
PROMPT_TOKENS = 200
MAX_THREADS = 1024


@dataclass(frozen=True)
class Network:
    """Assumed links between ranks."""

    alpha: float  # seconds of one message
    bandwidth: float  # bytes a second

    def reduction(self, ranks: int, num_bytes: float) -> float:
        """Seconds of an all-reduce up and down a tree."""
        return 2 * math.log2(ranks) * self.alpha + 2 * num_bytes / self.bandwidth

    def gather(self, ranks: int, num_bytes: float) -> float:
        """Seconds until every rank has all ranks' bytes, `num_bytes` in all."""
        return math.log2(ranks) * self.alpha + num_bytes / self.bandwidth


@dataclass(frozen=True)
class Balance:
    """How even the data-parallel ranks are, largest over mean, and their micro-batches."""

    tokens: float
    cost: float
    microbatches: int  # of the busiest rank, which is how many every rank runs
    microbatches_mean: float


@dataclass(frozen=True)
class Part:
    """Seconds of one part of a step on one rank."""

    name: str
    seconds: float
    measured: bool
    selects: bool  # is selection, not the moving, packing and logging that training takes anyway


def answer_lengths(num_tokens: float, longest: int, seed: int) -> Tensor:
    """[N] int64 lengths that add up to about `num_tokens`: log-normal around a quarter of `longest`, cut there.

    The spread, a factor of two to either side for two in three, is that of reasoning answers to one prompt mix.
    """
    generator = torch.Generator().manual_seed(seed)
    median = longest / 4
    sample = (median * 2.0 ** torch.randn(10_000, generator=generator)).clamp(4, longest)
    num = max(2, round(num_tokens / float(sample.mean())))
    return (median * 2.0 ** torch.randn(num, generator=generator)).clamp(4, longest).long()


def batch_of(lengths: Tensor, samples: int, seed: int) -> Experience:
    """A batch with binary rewards: prompts from never to always solved, like a real mix."""
    generator = torch.Generator().manual_seed(seed + 1)
    num = len(lengths) // samples * samples
    groups = torch.arange(num) // samples
    solved = torch.rand(num // samples, generator=generator).mul(1.4).sub(0.2).clamp(0, 1)
    rewards = (torch.rand(num, generator=generator) < solved[groups]).double()
    return Experience.new(seed, 0, groups, rewards, lengths[:num])


def balance_of(parts: Sequence[Sequence[int]], lengths: Sequence[int], max_tokens: int) -> Balance:
    """Of samples shared out as `parts`; micro-batches by first fit of whole samples."""
    tokens = [sum(lengths[i] for i in part) for part in parts]
    cost_of = cost(torch.tensor(lengths)).tolist()
    costs = [sum(cost_of[i] for i in part) for part in parts]
    bins = [len(ops.first_fit([min(lengths[i], max_tokens) for i in part], max_tokens)) for part in parts]
    mean = [sum(values) / len(values) for values in (tokens, costs, bins)]
    return Balance(max(tokens) / mean[0], max(costs) / mean[1], max(bins), mean[2])


def seconds_per_token(longest: int, max_tokens: int) -> tuple[float, float]:
    """(laying samples into rows, handing rollouts over), measured on about 2^20 tokens: both are linear."""
    lengths = answer_lengths(2**20, longest, seed=7)
    prompts = [Prompt("", "", (i,) * PROMPT_TOKENS, "") for i in range(len(lengths))]
    rollouts = [
        Rollout(Request(i, i, prompts[i], 0), (2,) * n, (-1.0,) * n, "stop", "") for i, n in enumerate(lengths.tolist())
    ]
    everything = Experience.new(
        *(0, 0, torch.arange(len(rollouts)), torch.zeros(len(rollouts)), lengths),
        prompt_lengths=torch.full_like(lengths, PROMPT_TOKENS),
    )
    alone = init_parallel(ActorConfig())
    (samples,), move_seconds = timed(lambda: share_out(rollouts, everything, everything.kept, 1, alone))
    shutdown()
    _, pack_seconds = timed(lambda: pack(samples, max_tokens))
    total = int(lengths.sum()) + PROMPT_TOKENS * len(rollouts)
    return pack_seconds / total, move_seconds / total


def simulate(
    plan: Plan, lengths: Tensor, samples: int, share: float, kept: int, num_scores: int, network: Network
) -> dict[str, Any]:
    """One step: its parts, balance and bytes, as plain values."""
    layout = plan.layout
    ranks, dp = layout.gpus, layout.dp
    recipe = make_recipe(replace(AlgorithmConfig(), samples_per_prompt=samples))
    experience = batch_of(lengths, samples, seed=0)
    selected, credit_seconds = timed(lambda: recipe.apply(experience, kept))
    _, log_seconds = timed(lambda: selection_metrics(experience, selected, recipe.advantages_of_all(experience)))
    uids = selected.kept.nonzero().flatten()
    whole = (experience.lengths[uids] + PROMPT_TOKENS).tolist()
    prompts, groups = torch.full_like(uids, PROMPT_TOKENS), experience.group_ids[uids]
    (_, replica), share_seconds = timed(lambda: plan_shares(uids, torch.tensor(whole), 1, dp, 0, 0, prompts, groups))
    parts = [(replica == r).nonzero().flatten().tolist() for r in range(dp)]
    before_of = _replica_of_prompts(int(experience.group_ids[-1]) + 1, layout)[experience.group_ids[uids]]
    before = [(before_of == replica).nonzero().flatten().tolist() for replica in range(dp)]
    kept_tokens = int(experience.lengths[uids].sum())
    per_rank = kept_tokens / dp
    top = run_top_share(min(num_scores, kept_tokens), min(dp, MAX_THREADS), share, seed=0)
    whole_shards = min(dp, max(1, int(num_scores / per_rank)))  # so many ranks' scores fit here at their real size
    shard = top
    if top.num_scores / top.ranks < per_rank:
        shard = run_top_share(round(min(num_scores, whole_shards * per_rank)), whole_shards, share, seed=1)
    growth = max(1.0, per_rank / (shard.num_scores / shard.ranks))
    busiest = max(sum(whole[i] for i in part) for part in parts)
    table_bytes, where_bytes = len(experience.uids) * 5 * 8, len(uids) * 2 * 8
    ids_bytes = (kept_tokens * 8 + len(uids) * PROMPT_TOKENS * 4) / dp
    pack_seconds, move_seconds = seconds_per_token(int(lengths.max()), layout.tokens)
    step = plan.selected.total
    timings = [
        Part("table of rewards, gathered", network.gather(ranks, table_bytes), False, True),
        Part("advantages and sample selection", credit_seconds, True, True),
        Part("token selection", shard.slowest * growth, growth < 1.001, True),
        Part(f"token selection's {top.rounds} reductions", _reductions(top, dp, network), False, True),
        Part("metrics of the selection, for the log", log_seconds, True, False),
        Part("lengths and owners of the kept, gathered", network.gather(ranks, where_bytes), False, False),
        Part("balance over ranks", share_seconds, True, False),
        Part("token ids to where they train, sent", network.gather(ranks, ids_bytes), False, False),
        Part("token ids, to tensors and back", move_seconds * busiest, False, False),
        Part("rows of micro-batches", pack_seconds * busiest, False, False),
    ]
    return {
        "ranks": ranks,
        "tp": layout.tp,
        "pp": layout.pp,
        "dp": dp,
        "rollouts": len(experience.uids),
        "tokens": int(experience.lengths.sum()),
        "longest": int(lengths.max()),
        "kept_rollouts": len(uids),
        "kept_tokens": kept_tokens,
        "step_seconds": step,
        "parts": [asdict(part) for part in timings],
        "selection_share": sum(part.seconds for part in timings if part.selects) / step,
        "other_share": sum(part.seconds for part in timings if not part.selects) / step,
        "before": asdict(balance_of(before, whole, layout.tokens)),
        "after": asdict(balance_of(parts, whole, layout.tokens)),
        "bytes": {
            "rewards table received": table_bytes,
            "top share sent": top.num_bytes,
            "lengths and owners received": where_bytes,
            "token ids and log-probs received": round(ids_bytes),
        },
        "top_share": asdict(top),
        "shard": asdict(shard),
    }


def _replica_of_prompts(num_prompts: int, layout: Layout) -> Tensor:
    """[P] the replica of the rank that answers each prompt; megatron-core's order: TP first, then DP."""
    replica_of = torch.empty(num_prompts, dtype=torch.int64)
    for rank in range(layout.gpus):
        share = rank_share(num_prompts, rank, layout.gpus)
        replica_of[share.start : share.stop] = rank // layout.tp % layout.dp
    return replica_of


def _reductions(top: TopShareRun, dp: int, network: Network) -> float:
    return top.rounds * network.reduction(dp, 0) + 2 * top.num_bytes / network.bandwidth


def text_of(found: dict[str, Any], model: str, network: Network) -> str:
    """The tables as people read them."""
    step, top, shard = found["step_seconds"], found["top_share"], found["shard"]
    lines = [
        f"{model} on {found['ranks']} ranks (TP {found['tp']}, PP {found['pp']}, DP {found['dp']}): "
        f"{found['rollouts']} rollouts of {found['tokens'] / 1e6:.4g} M tokens, the longest {found['longest']}; "
        f"{found['kept_rollouts']} kept with {found['kept_tokens'] / 1e6:.4g} M",
        f"a step takes {step:.0f} s by the planner",
        "",
        f"{'':<46}{'seconds':>10}{'of a step':>12}",
    ]
    for part in found["parts"]:
        mark = "m" if part["measured"] else "~"
        lines.append(f"  {part['name']:<44}{part['seconds']:>9.4f}{mark}{part['seconds'] / step:>12.4%}")
    verdict = "under" if found["selection_share"] < GOAL else "NOT under"
    lines += [
        f"  {'selection':<44}{found['selection_share'] * step:>9.4f} {found['selection_share']:>12.4%}"
        f"   {verdict} {GOAL:.1%}",
        f"  {'moving, packing, metrics':<44}{found['other_share'] * step:>9.4f} {found['other_share']:>12.4%}",
        "",
        f"{'over the data-parallel ranks':<46}{'before':>10}{'after':>12}",
    ]
    before, after = found["before"], found["after"]
    for name, label in (("tokens", "tokens, largest / mean"), ("cost", "cost, largest / mean")):
        lines.append(f"  {label:<44}{before[name]:>10.4f}{after[name]:>12.4f}")
    for name, label in (
        ("microbatches", "micro-batches of the busiest, run by all"),
        ("microbatches_mean", "micro-batches, mean"),
    ):
        lines.append(f"  {label:<44}{before[name]:>10.4g}{after[name]:>12.4g}")
    lines += ["", "bytes of one rank"]
    lines += [f"  {name:<44}{size:>10,}" for name, size in found["bytes"].items()]
    lines += [
        "",
        f"token selection: exactly {top['num_kept']} kept of {top['num_scores'] / 1e6:.4g} M over {top['ranks']} ranks "
        f"in threads, {top['rounds']} reductions",
        f"its time: {shard['ranks']} ranks with {shard['num_scores'] / shard['ranks'] / 1e6:.4g} M each; slowest "
        f"{shard['slowest'] * 1e3:.2f} ms, mean {shard['mean'] * 1e3:.2f} ms",
        f"m measured here on one core; ~ modelled (--help): {network.alpha * 1e6:g} us a message and "
        f"{network.bandwidth / 1e9:g} GB/s are assumed",
    ]
    return "\n".join(lines)


def make_plan(args: argparse.Namespace, num_rollouts: int, mean_length: float) -> Plan:
    """The planner's layout for this batch, and its step time."""
    work = Work(
        prompts=max(1, num_rollouts // args.samples),
        samples=args.samples,
        prompt_tokens=PROMPT_TOKENS,
        answer_tokens=round(mean_length),
        max_tokens=min(32768, PROMPT_TOKENS + args.longest),
        kept_share=args.kept / args.samples,
    )
    machine = Machine(memory_gb=args.gpu_memory)
    return best(shape_of(args.model), args.ranks, work, machine, Fixed(tp=args.tp, pp=args.pp), Rollouts(sleeps=True))


def main(argv: Sequence[str]) -> int:
    """The command line; exit code 1 where selection takes more than its share of a step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Llama-3.1-70B", help=f"folder with config.json, or {', '.join(MODELS)}")
    parser.add_argument("--ranks", type=int, default=1024, help="GPUs of 80 GB (default 1024)")
    parser.add_argument("--gpu-memory", type=float, default=80.0, help="GB")
    parser.add_argument("--tp", type=int, help="fixed instead of planned")
    parser.add_argument("--pp", type=int, help="fixed instead of planned")
    parser.add_argument("--tokens", type=float, default=1e9, help="response tokens of a step (default 1e9)")
    parser.add_argument("--longest", type=int, default=16384, help="longest answer; the median is a quarter of it")
    parser.add_argument("--samples", type=int, default=32, help="rollouts per prompt")
    parser.add_argument("--kept", type=int, default=20, help="N, kept per prompt: 20 of 32 is d3s' mean")
    parser.add_argument("--share", type=float, default=0.25, help="rho, share of the kept tokens: 0.25 is d3s' mean")
    parser.add_argument(
        "--scores", type=float, default=1e8, help="most scores of the measured token selection, about 40 bytes each"
    )
    parser.add_argument("--latency", type=float, default=20.0, help="microseconds of a message, assumed")
    parser.add_argument("--network", type=float, default=Machine().network_gb, help="GB/s of a rank, assumed")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    network = Network(args.latency * 1e-6, args.network * 1e9)
    lengths = answer_lengths(args.tokens, args.longest, seed=0)
    try:
        plan = make_plan(args, len(lengths), float(lengths.double().mean()))
    except ValueError as wrong:
        print(f"error: {wrong}", file=sys.stderr)
        return 2
    found = simulate(plan, lengths, args.samples, args.share, args.kept, int(args.scores), network)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    print(text_of(found, args.model, network))
    return int(found["selection_share"] >= GOAL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
