"""A layout for a model and a machine, what it takes and why; or what the layout of a configuration takes:

python -m d3s_megatron.plan --model NAME_OR_FOLDER --gpus 64 --gpu-memory 80
python -m d3s_megatron.plan --model NAME_OR_FOLDER --gpus 8 --config examples/math/qwen2.5-math-7b.yaml
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from d3s_megatron.plan.cost import Machine, Work
from d3s_megatron.plan.memory import Memory, model_parameters
from d3s_megatron.plan.models import MODELS, shape_of
from d3s_megatron.plan.recipe import asked_by
from d3s_megatron.plan.search import RESERVE, Fixed, Plan, Rollouts, best, check_fits, evaluate


def main(argv: Sequence[str]) -> int:
    """The command line; exit code 2 with one line where nothing fits."""
    args = _parser().parse_args(argv)
    machine = Machine(args.gpu_memory, args.gpu_tflops, args.gpu_bandwidth, args.network)
    work = Work(args.prompts, args.samples, args.prompt_tokens, args.answer_tokens, args.max_tokens, args.kept_share)
    try:
        shape = shape_of(args.model)
        if args.config:
            asked = asked_by(args.config, args.gpus, args.prompt_tokens, args.answer_tokens)
            work = asked.work
            plan = evaluate(shape, asked.layout, work, machine, asked.rollouts, asked.with_reference)
            check_fits(plan, machine)
        else:
            fixed = Fixed(args.tp, args.pp, args.vpp, args.cp, args.recompute, args.tokens)
            rollouts = Rollouts(sleeps=args.offload, state_to_host=args.offload_state)
            plan = best(shape, args.gpus, work, machine, fixed, rollouts, args.reference)
    except ValueError as wrong:
        print(f"error: {wrong}", file=sys.stderr)
        return 2
    print(text_of(plan, args.model, model_parameters(shape), work, machine))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m d3s_megatron.plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help=f"folder with config.json, or one of {', '.join(MODELS)}")
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument(
        "--config", type=Path, help="YAML of a run, whose layout, batch and engine are taken as they are"
    )
    parser.add_argument("--gpu-memory", type=float, default=80.0, help="GB (1e9 bytes) of one GPU")
    parser.add_argument("--gpu-tflops", type=float, default=989.0, help="dense bfloat16")
    parser.add_argument("--gpu-bandwidth", type=float, default=3.35, help="TB/s")
    parser.add_argument("--network", type=float, default=50.0, help="GB/s between nodes, a GPU")
    for name in ("tp", "pp", "vpp", "tokens"):
        parser.add_argument(f"--{name}", type=int, help="fixed instead of searched")
    parser.add_argument("--cp", type=int, default=1, help="context-parallel ranks, which are not searched")
    parser.add_argument("--recompute", choices=("none", "selective", "full"), help="fixed instead of searched")
    parser.add_argument(
        "--offload", action="store_true", help="the engine sleeps while the model trains (rollout.vllm_sleep)"
    )
    parser.add_argument("--offload-state", action="store_true", help="actor.offload_between_phases")
    parser.add_argument("--reference", action="store_true", help="a reference model for the KL term")
    work = Work()
    for name in ("prompts", "samples", "prompt_tokens", "answer_tokens", "max_tokens"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(work, name))
    parser.epilog = "tokens of prompts and answers are means, but for --max-tokens"
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
        *([f"  actor.context_parallel_size                 {layout.cp}"] if layout.cp > 1 else []),
        f"  (data parallel)                             {layout.dp}",
        f"  actor.sequence_parallel                     {str(layout.sequence_parallel).lower()}",
        f"  actor.use_distributed_optimizer             {str(layout.distributed_optimizer).lower()}",
        f"  actor.recompute                             {layout.recompute}",
        f"  actor.max_tokens_per_microbatch             {layout.tokens}",
    ]
    if plan.engine:
        lines += [
            f"  rollout.vllm_tensor_parallel                {plan.engine_tp}",
            f"  rollout.max_batch_size                      {plan.answers}",
            f"  rollout.vllm_memory_share                   {share_of(plan.engine, machine):.2f}",
        ]
    names = list(Memory.__dataclass_fields__)
    shown = sorted({0, plan.fullest, layout.pp - 1})
    lines += ["", "memory of one rank, GB" + "".join(f"{'stage ' + str(s):>12}" for s in shown)]
    for name in names:
        lines.append(f"  {name:<20}" + "".join(f"{getattr(plan.stages[s], name) / 1e9:>12.2f}" for s in shown))
    lines.append(f"  {'total in training':<20}" + "".join(f"{plan.stages[s].total / 1e9:>12.2f}" for s in shown))
    lines.append(f"while answers are made: {plan.answering / 1e9:.2f}, of which the engine {plan.engine / 1e9:.2f}")
    lines += ["", f"seconds of a step{'selection':>22}{'everything':>12}"]
    for name in plan.selected.__dataclass_fields__:
        lines.append(f"  {name:<20}{getattr(plan.selected, name):>17.1f}{getattr(plan.everything, name):>12.1f}")
    lines.append(f"  {'total':<20}{plan.selected.total:>17.1f}{plan.everything.total:>12.1f}")
    fullest = plan.stages[plan.fullest]
    largest = max(names, key=lambda name: getattr(fullest, name))
    binds = f"{largest} on stage {plan.fullest}"
    if plan.answering > fullest.total:
        binds = "what the trainer keeps while answers are made"
    slowest = max(plan.selected.__dataclass_fields__, key=lambda name: getattr(plan.selected, name))
    lines += [
        "",
        f"memory is bound by {binds}; {plan.free:.0%} of a GPU is left beside a reserve of {RESERVE:.0%}",
        f"time is bound by {slowest}",
        f"assumed: {machine.utilisation:.0%} of {machine.tflops:g} TFLOP/s, {machine.decode_utilisation:.0%} of "
        f"{machine.bandwidth_tb:g} TB/s in decoding, {work.kept_share:.0%} of {work.rollouts} rollouts kept; "
        "times are modelled, not measured",
    ]
    return "\n".join(lines)


def share_of(num_bytes: int, machine: Machine) -> float:
    """Of a GPU's memory, rounded up to a hundredth."""
    return math.ceil(num_bytes / (machine.memory_gb * 1e7)) / 100


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
