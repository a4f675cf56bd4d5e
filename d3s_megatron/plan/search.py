"""The fastest layout that fits, by the models of memory.py and cost.py, and what it is bound by."""

from __future__ import annotations

from dataclasses import dataclass

from d3s_megatron.convert import ModelShape, check_tp
from d3s_megatron.plan.cost import Machine, Times, Work, num_microbatches, step_times
from d3s_megatron.plan.memory import Layout, Memory, engine_bytes, model_parameters, stage_memory

RESERVE = 0.08  # of a GPU's memory, for CUDA, NCCL's buffers and fragmentation
GPUS_PER_NODE = 8  # tensor parallelism stays inside one


@dataclass(frozen=True)
class Fixed:
    """What the user has decided; None is left to the search."""

    tp: int | None = None
    pp: int | None = None
    vpp: int | None = None
    recompute: str | None = None
    tokens: int | None = None


@dataclass(frozen=True)
class Plan:
    """One layout with what it takes."""

    layout: Layout
    engine_tp: int
    stages: tuple[Memory, ...]
    selected: Times
    everything: Times
    free: float  # share of the fullest rank's memory that is left

    @property
    def fullest(self) -> int:
        return max(range(len(self.stages)), key=lambda stage: self.stages[stage].total)


def engine_ranks(shape: ModelShape, machine: Machine, gpus: int) -> int:
    """Ranks of one rollout engine: the fewest whose share of the weights takes a third of the memory at most."""
    ranks = 1
    while 2 * model_parameters(shape) / ranks > machine.memory_gb * 1e9 / 3 and ranks < min(gpus, GPUS_PER_NODE):
        ranks *= 2
    return ranks


def evaluate(
    shape: ModelShape, layout: Layout, work: Work, machine: Machine, offload: bool, with_reference: bool = False
) -> Plan:
    """What a layout takes; with `offload` the engine's memory is free while the model trains."""
    engine_tp = engine_ranks(shape, machine, layout.gpus)
    answers = min(work.answers_at_once, -(-work.rollouts * engine_tp // layout.gpus))
    engine = engine_bytes(shape, engine_tp, answers, work.prompt_tokens + work.answer_tokens)
    micro = num_microbatches(layout, work, work.kept_share)
    beside = 0 if offload else engine
    stages = tuple(stage_memory(shape, layout, s, micro, beside, with_reference) for s in range(layout.pp))
    worst = max(memory.total for memory in stages) / (machine.memory_gb * 1e9)
    return Plan(
        layout,
        engine_tp,
        stages,
        step_times(shape, layout, work, machine, engine_tp, work.kept_share),
        step_times(shape, layout, work, machine, engine_tp, 1.0),
        1 - RESERVE - worst,
    )


def candidates(shape: ModelShape, gpus: int, work: Work, fixed: Fixed) -> list[Layout]:
    """Layouts that the model and the number of GPUs admit."""
    found = []
    for tp in [fixed.tp] if fixed.tp else [1, 2, 4, 8]:
        try:
            check_tp(shape, tp)
        except ValueError:
            if fixed.tp:
                raise
            continue
        for pp in [fixed.pp] if fixed.pp else [n for n in range(1, shape.num_layers + 1) if shape.num_layers % n == 0]:
            if gpus % (tp * pp):
                continue
            for recompute in [fixed.recompute] if fixed.recompute else ["none", "selective", "full"]:
                for tokens in [fixed.tokens] if fixed.tokens else _token_limits(work):
                    vpp = fixed.vpp or 1
                    found.append(
                        Layout(
                            tp=tp,
                            pp=pp,
                            vpp=vpp,
                            dp=gpus // (tp * pp),
                            sequence_parallel=tp > 1,
                            recompute=recompute,
                            tokens=tokens,
                        )
                    )
    if not found:
        raise ValueError(
            f"gpus is {gpus}: no tensor and pipeline parallel sizes of this model ({shape.num_layers} layers, "
            f"{shape.num_heads} heads) make a divisor of it; give a multiple of 8, or other --tp and --pp"
        )
    return found


def _token_limits(work: Work) -> list[int]:
    limits = [work.max_tokens]
    while limits[-1] * 2 <= 32768:
        limits.append(limits[-1] * 2)
    return limits


# An all-reduce per layer and direction slows tensor parallelism; the share was not measured here, it breaks ties.
TP_COST = 0.02


def best(
    shape: ModelShape,
    gpus: int,
    work: Work,
    machine: Machine,
    fixed: Fixed,
    offload: bool = False,
    with_reference: bool = False,
) -> Plan:
    """The fastest plan that fits; ValueError with what is nearest where none does."""
    plans = [
        evaluate(shape, layout, work, machine, offload, with_reference)
        for layout in candidates(shape, gpus, work, fixed)
    ]
    fitting = [plan for plan in plans if plan.free >= 0]
    if not fitting:
        nearest = max(plans, key=lambda plan: plan.free)
        need = nearest.stages[nearest.fullest].total / 1e9
        raise ValueError(
            f"nothing fits {gpus} GPUs of {machine.memory_gb:g} GB: the nearest takes {need:.1f} GB (TP "
            f"{nearest.layout.tp}, PP {nearest.layout.pp}, DP {nearest.layout.dp}, recompute "
            f"{nearest.layout.recompute}); use more GPUs, or --offload"
        )
    return min(fitting, key=lambda plan: plan.selected.total * (1 + TP_COST * (plan.layout.tp - 1)))
