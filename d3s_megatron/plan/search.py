"""The fastest layout that fits, by the models of memory.py and cost.py, and what it is bound by."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
    cp: int = 1  # never searched: it pays for long answers only, which the rates here do not tell
    recompute: str | None = None
    tokens: int | None = None


@dataclass(frozen=True)
class Plan:
    """One layout with what it takes."""

    layout: Layout
    engine_tp: int
    answers: int  # at once in one engine, at most
    stages: tuple[Memory, ...]  # while the model trains; without a sleeping engine's bytes
    answering: int  # bytes of the fullest rank while answers are made
    engine: int  # of which the rollout engine's
    selected: Times
    everything: Times
    free: float  # share of the fullest rank's memory that is left, in the fuller of the two phases

    @property
    def fullest(self) -> int:
        return max(range(len(self.stages)), key=lambda stage: self.stages[stage].total)


def engine_ranks(shape: ModelShape, machine: Machine, gpus: int) -> int:
    """Ranks of one rollout engine: the fewest whose share of the weights takes a third of the memory at most."""
    ranks = 1
    while 2 * model_parameters(shape) / ranks > machine.memory_gb * 1e9 / 3 and ranks < min(gpus, GPUS_PER_NODE):
        ranks *= 2
    return ranks


@dataclass(frozen=True)
class Rollouts:
    """The rollout engine beside the trainer."""

    tp: int | None = None  # ranks of one engine; None is left to `engine_ranks`
    sleeps: bool = False  # gives its memory back while the model trains
    apart: bool = False  # on devices outside of the job
    memory_share: float | None = None  # of a GPU, that an engine takes; None is what its answers at once need
    state_to_host: bool = False  # gradients and optimizer leave the device while answers are made


def evaluate(
    shape: ModelShape,
    layout: Layout,
    work: Work,
    machine: Machine,
    rollouts: Rollouts = Rollouts(),
    with_reference: bool = False,
) -> Plan:
    """What a layout takes, while the model trains and while answers are made."""
    engine_tp = rollouts.tp or engine_ranks(shape, machine, layout.gpus)
    answers = min(work.answers_at_once, -(-work.rollouts * engine_tp // layout.gpus))
    engine = 0 if rollouts.apart else engine_bytes(shape, engine_tp, answers, work.prompt_tokens + work.answer_tokens)
    if rollouts.memory_share and not rollouts.apart:
        engine = max(engine, round(rollouts.memory_share * machine.memory_gb * 1e9))
    micro = num_microbatches(layout, work, work.kept_share)
    beside = 0 if rollouts.sleeps else engine
    stages = tuple(stage_memory(shape, layout, s, micro, beside, with_reference) for s in range(layout.pp))
    answering = engine + max(
        m.weights + m.reference + m.sync + (0 if rollouts.state_to_host else m.gradients + m.optimizer) for m in stages
    )
    worst = max(answering, *(memory.total for memory in stages)) / (machine.memory_gb * 1e9)
    return Plan(
        layout,
        engine_tp,
        work.answers_at_once,
        stages,
        answering,
        engine,
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
            if gpus % (tp * pp * fixed.cp):
                continue
            for recompute in [fixed.recompute] if fixed.recompute else ["none", "selective", "full"]:
                for tokens in [fixed.tokens] if fixed.tokens else _token_limits(work):
                    vpp = fixed.vpp or 1
                    found.append(
                        Layout(
                            tp=tp,
                            pp=pp,
                            vpp=vpp,
                            dp=gpus // (tp * pp * fixed.cp),
                            cp=fixed.cp,
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
HALVINGS = 4  # of the answers at once in an engine, before a machine is too small


def best(
    shape: ModelShape,
    gpus: int,
    work: Work,
    machine: Machine,
    fixed: Fixed,
    rollouts: Rollouts = Rollouts(),
    with_reference: bool = False,
) -> Plan:
    """The fastest plan that fits, with fewer answers at once where none does; ValueError with what is nearest."""
    layouts = candidates(shape, gpus, work, fixed)
    for answers in (work.answers_at_once // 2**halvings for halvings in range(HALVINGS + 1)):
        fewer = replace(work, answers_at_once=max(1, answers))
        plans = [evaluate(shape, layout, fewer, machine, rollouts, with_reference) for layout in layouts]
        fitting = [plan for plan in plans if plan.free >= 0]
        if fitting:
            return min(fitting, key=lambda plan: plan.selected.total * (1 + TP_COST * (plan.layout.tp - 1)))
    check_fits(max(plans, key=lambda plan: plan.free), machine)
    raise AssertionError("no plan has room, though one of them was said to fit")


def check_fits(plan: Plan, machine: Machine) -> None:
    """ValueError with what it takes where a plan, the nearest of those tried, does not fit."""
    if plan.free >= 0:
        return
    layout = plan.layout
    need = max(plan.answering, plan.stages[plan.fullest].total) / 1e9
    context = f"CP {layout.cp}, " if layout.cp > 1 else ""
    cut = f"TP {layout.tp}, PP {layout.pp}, {context}DP {layout.dp}, recompute {layout.recompute}"
    raise ValueError(
        f"nothing fits {layout.gpus} GPUs of {machine.memory_gb:g} GB: the nearest takes {need:.1f} GB beside a "
        f"reserve of {RESERVE:.0%} ({cut}); use more GPUs, --offload or --offload-state"
    )
