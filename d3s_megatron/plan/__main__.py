"""`python -m d3s_megatron.plan --model NAME_OR_FOLDER --gpus 64 --gpu-memory 80`: a layout, what it takes and why."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from d3s_megatron.plan.cost import Machine, Work
from d3s_megatron.plan.memory import Memory, model_parameters
from d3s_megatron.plan.models import MODELS, shape_of
from d3s_megatron.plan.search import RESERVE, Fixed, Plan, best


def main(argv: Sequence[str]) -> int:
    """The command line; exit code 2 with one line where nothing fits."""
    args = _parser().parse_args(argv)
    machine = Machine(args.gpu_memory, args.gpu_tflops, args.gpu_bandwidth, args.network)
    work = Work(args.prompts, args.samples, args.prompt_tokens, args.answer_tokens, args.max_tokens, args.kept_share)
    fixed = Fixed(args.tp, args.pp, args.vpp, args.recompute, args.tokens)
    try:
        shape = shape_of(args.model)
        plan = best(shape, args.gpus, work, machine, fixed, args.offload, args.reference)
    except ValueError as wrong:
        print(f"error: {wrong}", file=sys.stderr)
        return 2
    print(text_of(plan, args.model, model_parameters(shape), work, machine))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m d3s_megatron.plan", description=__doc__)
    parser.add_argument("--model", required=True, help=f"folder with config.json, or one of {', '.join(MODELS)}")
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--gpu-memory", type=float, default=80.0, help="GB (1e9 bytes) of one GPU")
    parser.add_argument("--gpu-tflops", type=float, default=989.0, help="dense bfloat16")
    parser.add_argument("--gpu-bandwidth", type=float, default=3.35, help="TB/s")
    parser.add_argument("--network", type=float, default=50.0, help="GB/s between nodes, a GPU")
    for name in ("tp", "pp", "vpp", "tokens"):
        parser.add_argument(f"--{name}", type=int, help="fixed instead of searched")
    parser.add_argument("--recompute", choices=("none", "selective", "full"), help="fixed instead of searched")
    parser.add_argument("--offload", action="store_true", help="the engine sleeps while the model trains")
    parser.add_argument("--reference", action="store_true", help="a reference model for the KL term")
    work = Work()
    for name in ("prompts", "samples", "prompt_tokens", "answer_tokens", "max_tokens"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(work, name))
    parser.add_argument("--kept-share", type=float, default=work.kept_share, help="rollouts that are trained on")
    return parser


def text_of(plan: Plan, model: str, parameters: int, work: Work, machine: Machine) -> str:
    """The plan as people read it."""
    layout = plan.layout
    lines = [
        f"{model}: {parameters / 1e9:.2f} G parameters on {layout.gpus} GPUs of {machine.memory_gb:g} GB",
        "",
        f"  actor.tensor_model_parallel_size            {layout.tp}",
        f"  actor.pipeline_model_parallel_size          {layout.pp}",
        f"  actor.virtual_pipeline_model_parallel_size  {layout.vpp}",
        f"  (data parallel)                             {layout.dp}",
        f"  actor.sequence_parallel                     {str(layout.sequence_parallel).lower()}",
        f"  actor.use_distributed_optimizer             {str(layout.distributed_optimizer).lower()}",
        f"  actor.recompute                             {layout.recompute}",
        f"  actor.max_tokens_per_microbatch             {layout.tokens}",
        f"  rollout engines                             {layout.gpus // plan.engine_tp}, of {plan.engine_tp} rank(s)",
    ]
    if plan.engine_tp > 1:
        lines.append("    the engines of this package stand on one rank each: such a model needs one over several")
    names = list(Memory.__dataclass_fields__)
    shown = sorted({0, plan.fullest, layout.pp - 1})
    lines += ["", "memory of one rank, GB" + "".join(f"{'stage ' + str(s):>12}" for s in shown)]
    for name in names:
        lines.append(f"  {name:<20}" + "".join(f"{getattr(plan.stages[s], name) / 1e9:>12.2f}" for s in shown))
    lines.append(f"  {'total':<20}" + "".join(f"{plan.stages[s].total / 1e9:>12.2f}" for s in shown))
    lines += ["", f"seconds of a step{'selection':>22}{'everything':>12}"]
    for name in plan.selected.__dataclass_fields__:
        lines.append(f"  {name:<20}{getattr(plan.selected, name):>17.1f}{getattr(plan.everything, name):>12.1f}")
    lines.append(f"  {'total':<20}{plan.selected.total:>17.1f}{plan.everything.total:>12.1f}")
    fullest = plan.stages[plan.fullest]
    largest = max(names, key=lambda name: getattr(fullest, name))
    slowest = max(plan.selected.__dataclass_fields__, key=lambda name: getattr(plan.selected, name))
    lines += [
        "",
        f"memory is bound by {largest} on stage {plan.fullest}; {plan.free:.0%} of a GPU is left beside a reserve of "
        f"{RESERVE:.0%}",
        f"time is bound by {slowest}",
        f"assumed: {machine.utilisation:.0%} of {machine.tflops:g} TFLOP/s, {machine.decode_utilisation:.0%} of "
        f"{machine.bandwidth_tb:g} TB/s in decoding, {work.kept_share:.0%} of {work.rollouts} rollouts kept; "
        "times are modelled, not measured",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
