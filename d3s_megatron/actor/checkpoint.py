"""The actor's state in a folder of megatron-core's dist_checkpointing (torch_dist), and back at any layout.

1. `begin_save` plans the save over all ranks and forks one writer a rank; training may go on while it writes.
2. `Save.finish` waits for the writers, agrees over all ranks that every one of them succeeded, and only then writes
   megatron's own mark of a whole checkpoint. Naming and keeping folders is the business of the caller.

Left out: anything that is a pure function of (seed, step). Prompt order, requests, sampling and schedules need the
step number alone.
"""

from __future__ import annotations

import inspect
import logging
import multiprocessing
import random
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException

from d3s_megatron.actor import cpu_device
from d3s_megatron.actor.megatron_actor import MegatronActor
from d3s_megatron.actor.parallel import Layout, world_reduce

# "fully_reshardable" is the one type of the distributed optimizer's state that any TP, PP and DP can read.
CONTENT = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


class Save:
    """A save on its way: the writers run, the folder is not whole yet."""

    def __init__(self, request: AsyncRequest, layout: Layout, folder: Path) -> None:
        self._request, self._layout, self._folder = request, layout, folder
        self._writer = None
        if request.async_fn is not None:
            args = list(request.async_fn_args)
            if request.preload_fn is not None:
                args[1] = request.preload_fn()  # tensors of a GPU are on the CPU from here on
            # Forked, so that the writer sees the weights of this moment, whatever the next step makes of them.
            self._writer = multiprocessing.get_context("fork").Process(
                target=request.async_fn, args=args, kwargs=request.async_fn_kwargs
            )
            self._writer.start()

    def is_done(self) -> bool:
        """Whether the writers of all ranks have ended; a collective."""
        busy = torch.tensor([int(self._writer is not None and self._writer.is_alive())])
        return not int(world_reduce(self._layout)(busy, "max"))

    def finish(self) -> None:
        """Waits for all writers and marks the folder; OSError on every rank where one of them failed; a collective."""
        if self._writer is not None:
            self._writer.join()
        cause: BaseException | None = None
        if self._writer is not None and self._writer.exitcode:
            cause = RuntimeError(f"the writer process ended with {self._writer.exitcode}")
        if self._any(cause is not None):
            raise OSError(f"checkpoint {self._folder} was not written, see the rank that failed: {cause}") from cause
        *collect, mark = self._request.finalize_fns
        with cpu_device.as_cpu():
            try:
                for step in collect:
                    step()
            except (Exception, CheckpointException) as failed:  # the latter is no Exception
                # Only the first rank hears of it: all must agree before one of them ends.
                cause = failed
            if self._any(cause is not None):
                raise OSError(f"checkpoint {self._folder} was not written: {cause or 'see the first rank'}") from cause
            mark()

    def _any(self, failed: bool) -> bool:
        return bool(world_reduce(self._layout)(torch.tensor([int(failed)]), "max"))


def begin_save(actor: MegatronActor, folder: Path, step: int) -> Save:
    """Starts to write model, optimizer, scheduler and per-rank random states into an empty folder; a collective.

    Args:
        step: training steps done so far; kept in the checkpoint for whoever reads it.
    """
    was_offloaded = actor.host.is_offloaded
    actor.host.restore()
    with cpu_device.as_cpu():
        state = _sharded_state(actor, is_loading=False)
        state |= {"step": step, "adam_steps": _adam_steps(actor), "scheduler_steps": actor.scheduler.num_steps}
        arguments: dict[str, Any] = {"async_sharded_save": True, "content_metadata": dict(CONTENT)}
        if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters:
            # megatron-core 0.19 would take NVIDIA's resiliency package, which a plain installation lacks.
            arguments["async_strategy"] = "mcore"
            logging.getLogger("megatron.core.dist_checkpointing.strategies.torch").setLevel(logging.ERROR)
        request = dist_checkpointing.save(state, str(folder), **arguments)
    torch.save(random_states(), folder / _random_file(actor.layout))
    save = Save(request, actor.layout, folder)  # has its own copy of everything from here on
    if was_offloaded:
        actor.host.offload()
    return save


def load(actor: MegatronActor, folder: Path) -> bool:
    """Fills model, optimizer and scheduler from a checkpoint of any layout; a collective.

    Learning rates, weight decay and the like stay those that the actor was made with. Returns whether the per-rank
    random states were restored too, which takes the same number of ranks.
    """
    optimizers = _optimizers(actor)
    with cpu_device.as_cpu():
        for optimizer in optimizers:
            _make_moments(optimizer.optimizer)
            if isinstance(optimizer, DistributedOptimizer):
                _accept_step(optimizer)
        settings = [_group_settings(optimizer.optimizer) for optimizer in optimizers]
        loaded = dist_checkpointing.load(_sharded_state(actor, is_loading=True), str(folder))
        for name, chunk in _chunks(actor).items():
            chunk.load_state_dict(loaded[name])
        actor.optimizer.load_state_dict(loaded["optimizer"])
        for optimizer, groups in zip(optimizers, settings, strict=True):
            for group, values in zip(optimizer.optimizer.param_groups, groups, strict=True):
                group.update(values)
            _set_adam_steps(optimizer.optimizer, loaded["adam_steps"])
        actor.scheduler.num_steps = loaded["scheduler_steps"]
        actor.scheduler.step(increment=0)
    states = folder / _random_file(actor.layout)
    if not states.exists():
        return False
    set_random_states(torch.load(states, weights_only=True))
    return True


def num_bytes(actor: MegatronActor) -> int:
    """Size of a checkpoint, over all ranks, to within its headers; a collective."""
    own = 0
    has_first_copy = actor.layout.dp_rank == actor.layout.cp_rank == 0
    if has_first_copy:
        own += sum(parameter.nbytes for chunk in actor.chunks for parameter in chunk.parameters())
    if has_first_copy or actor.config.use_distributed_optimizer:
        for optimizer in _optimizers(actor):
            masters = not isinstance(optimizer, FP32Optimizer)  # main weights beside the two moments
            sizes = (p.numel() for group in optimizer.optimizer.param_groups for p in group["params"])
            own += sum(sizes) * 4 * (2 + masters)
    return int(world_reduce(actor.layout)(torch.tensor([own], dtype=torch.int64), "sum"))


def random_states() -> dict[str, Any]:
    """This rank's states of torch's and Python's generators."""
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": [version, list(words), gauss]}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Undoes what was drawn since `random_states`."""
    torch.set_rng_state(states["torch"])
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _random_file(layout: Layout) -> str:
    return f"random-{layout.rank:05d}-of-{layout.world_size:05d}.pt"


def _sharded_state(actor: MegatronActor, is_loading: bool) -> dict[str, Any]:
    for optimizer in _optimizers(actor):
        _make_moments(optimizer.optimizer)  # a save before the first step: moments of zero are what it would start with
    model = {name: chunk.sharded_state_dict(metadata=dict(CONTENT)) for name, chunk in _chunks(actor).items()}
    optimizer = actor.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=dict(CONTENT))
    return {**model, "optimizer": optimizer}


def _chunks(actor: MegatronActor) -> dict[str, Any]:
    """This rank's chunks of layers by the names that megatron-core's own training gives them."""
    if len(actor.chunks) == 1:
        return {"model": actor.chunks[0]}
    return {f"model{i}": chunk for i, chunk in enumerate(actor.chunks)}


def _optimizers(actor: MegatronActor) -> list:
    return list(getattr(actor.optimizer, "chained_optimizers", [actor.optimizer]))


def _has_step_per_parameter(optimizer: torch.optim.Optimizer) -> bool:
    """True for torch's own Adam; the fused ones count steps in the parameter group."""
    return isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)


def _make_moments(optimizer: torch.optim.Optimizer) -> None:
    """Gives torch's Adam the state it would make in its first step, which megatron-core takes for granted."""
    if not _has_step_per_parameter(optimizer):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = {
                    "step": torch.zeros(()),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def _accept_step(optimizer: DistributedOptimizer) -> None:
    """Lets megatron-core load into torch's Adam, whose `step` it wants to copy though no checkpoint holds one."""
    copy_states = type(optimizer)._set_main_param_and_optimizer_states

    def with_step(model_param: Tensor, tensors: dict[str, Tensor]) -> None:
        group, order = optimizer.model_param_group_index_map[model_param]
        own = optimizer.optimizer.state[optimizer.optimizer.param_groups[group]["params"][order]]
        copy_states(optimizer, model_param, {**tensors, **({"step": own["step"]} if "step" in own else {})})

    optimizer._set_main_param_and_optimizer_states = with_step


def _adam_steps(actor: MegatronActor) -> int:
    """Optimizer steps taken so far, the same for every parameter and rank."""
    counts = {0}
    for optimizer in _optimizers(actor):
        counts |= {int(group["step"]) for group in optimizer.optimizer.param_groups if "step" in group}
        counts |= {int(state["step"]) for state in optimizer.optimizer.state.values() if "step" in state}
    return max(counts)


def _set_adam_steps(optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Gives every parameter a step count of its own.

    megatron-core's distributed optimizer hands one tensor to all of them, which the next step would then count up
    once a parameter.
    """
    if not _has_step_per_parameter(optimizer):
        return
    for state in optimizer.state.values():
        state["step"] = torch.tensor(float(steps))


def _group_settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in group.items() if k not in ("params", "step")} for group in optimizer.param_groups]
