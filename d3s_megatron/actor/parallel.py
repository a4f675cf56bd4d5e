"""Process groups: one process per rank, started by torchrun (or alone), and where a rank stands in the layout."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor

from d3s_megatron.actor import cpu_device
from d3s_megatron.actor.config import ActorConfig


@dataclass(frozen=True)
class Layout:
    """Sizes of the layout and this rank's place in it."""

    rank: int
    world_size: int
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    dp_rank: int
    dp_size: int
    device: torch.device
    cp_rank: int = 0
    cp_size: int = 1

    def replica_of(self, rank: int) -> int:
        """The `dp_rank` of any rank: stages are outermost, then replicas, then context- and tensor-parallel ranks."""
        return rank // (self.tp_size * self.cp_size) % self.dp_size

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    @property
    def speaks(self) -> bool:
        """Whether this rank speaks for its model replica, all of whose ranks have the same samples and scores."""
        return self.tp_rank == self.cp_rank == self.pp_rank == 0


def check_layout(config: ActorConfig, world_size: int) -> None:
    """ValueError where the world does not hold a whole number of model replicas; needs no process group."""
    tp, pp, cp = (
        config.tensor_model_parallel_size,
        config.pipeline_model_parallel_size,
        config.context_parallel_size,
    )
    if world_size % (tp * pp * cp):
        context = f" x actor.context_parallel_size {cp}" if cp > 1 else ""
        raise ValueError(
            f"{world_size} processes cannot hold replicas of actor.tensor_model_parallel_size {tp} x "
            f"actor.pipeline_model_parallel_size {pp}{context} ranks: start a multiple of {tp * pp * cp} processes, "
            "or lower them"
        )


def virtual_chunks(config: ActorConfig) -> int | None:
    """Chunks of layers per stage as megatron-core wants them said: None without interleaving."""
    num = config.virtual_pipeline_model_parallel_size
    return num if num > 1 else None


def world_size_from_env() -> int:
    """Number of processes that torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def init_parallel(config: ActorConfig) -> Layout:
    """Joins the process group and makes megatron-core's groups; gloo without a GPU, NCCL with one."""
    cpu_device.install()
    # Lets megatron-core's tensor-parallel all-reduces overlap with GEMMs on a GPU, and spares its warning elsewhere.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if "RANK" not in os.environ:  # plain python: a world of one, on a port that is held, so that two runs never meet
        global _own_store
        _own_store = dist.TCPStore("127.0.0.1", 0, 1, True)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_own_store.port))
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    check_layout(config, world_size_from_env())
    device = cpu_device.CPU
    if not cpu_device.needed():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        timeout = datetime.timedelta(minutes=config.timeout_minutes)
        dist.init_process_group("gloo" if device.type == "cpu" else "nccl", timeout=timeout, **_agent_store(timeout))
    with cpu_device.as_cpu():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=config.tensor_model_parallel_size,
            pipeline_model_parallel_size=config.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=virtual_chunks(config),
            context_parallel_size=config.context_parallel_size,
        )
        if device.type == "cpu":
            # Its fork() does nothing, so attention asks for no CUDA generator.
            tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)
        tensor_parallel.model_parallel_cuda_manual_seed(0)
    layout = Layout(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pp_size=parallel_state.get_pipeline_model_parallel_world_size(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        device=device,
        cp_rank=parallel_state.get_context_parallel_rank(),
        cp_size=parallel_state.get_context_parallel_world_size(),
    )
    assert layout.replica_of(layout.rank) == layout.dp_rank
    return layout


_num_joins = 0
_own_store: dist.TCPStore | None = None  # of a process that nobody launched


def _agent_store(timeout: datetime.timedelta) -> dict[str, Any]:
    """Arguments that join under names of their own in a store that is there; none where torchrun shares no store.

    torchrun hands the same store to the ranks it starts again after a failure (and a process may join twice). Without
    names of their own they would find the addresses of the ranks that are gone, and wait for those.
    """
    global _num_joins
    _num_joins += 1
    if _own_store is not None:
        return {"store": dist.PrefixStore(f"join-{_num_joins}", _own_store), "rank": 0, "world_size": 1}
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world_size_from_env(), False, timeout=timeout
    )
    attempt = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-{_num_joins}"
    return {
        "store": dist.PrefixStore(f"attempt-{attempt}", store),
        "rank": int(os.environ["RANK"]),
        "world_size": world_size_from_env(),
    }


_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


@dataclass(frozen=True)
class RankReduce:
    """A `Reduce` (types.py) that knows how many ranks take part, and which of them this one is."""

    group: dist.ProcessGroup | None  # None: all ranks
    rank: int
    num_ranks: int
    device: torch.device

    def __call__(self, tensor: Tensor, op: str) -> Tensor:
        if self.num_ranks == 1:
            return tensor
        on_device = tensor.to(self.device)
        dist.all_reduce(on_device, op=_OPS[op], group=self.group)
        if on_device is not tensor:
            tensor.copy_(on_device)
        return tensor


def data_parallel_reduce(layout: Layout) -> RankReduce:
    """Over the ranks that hold different samples; context-parallel ranks hold the same."""
    return RankReduce(parallel_state.get_data_parallel_group(), layout.dp_rank, layout.dp_size, layout.device)


def world_reduce(layout: Layout) -> RankReduce:
    """Over all ranks."""
    return RankReduce(None, layout.rank, layout.world_size, layout.device)


def gather_rows(local: Tensor, layout: Layout, room: int = 0) -> list[Tensor]:
    """1-D CPU tensors of unequal length, one a rank, to the list of all of them on every rank.

    `room`, the same on every rank, is how many elements a rank is thought to have at most: one collective where that
    is so, two where it is not.
    """
    if layout.world_size == 1:
        return [local]
    sizes, rows = _gather_first(local, room, layout)
    longest = int(sizes.max())
    if longest > room:
        _, rows = _gather_first(local, longest, layout)
    return [row[:size] for row, size in zip(rows, sizes.tolist(), strict=True)]


def _gather_first(local: Tensor, num: int, layout: Layout) -> tuple[Tensor, Tensor]:
    """How many elements each rank has, [ranks] int64, and the first `num` of each, [ranks, num]."""
    header, width = 8, local.itemsize
    sent = torch.zeros(header + num * width, dtype=torch.uint8)
    sent[:header] = torch.tensor([len(local)]).view(torch.uint8)
    sent[header : header + len(local) * width] = local[:num].contiguous().view(torch.uint8)
    received = torch.empty(layout.world_size, len(sent), dtype=torch.uint8, device=layout.device)
    dist.all_gather(list(received), sent.to(layout.device))
    sizes, values = received.cpu().split([header, num * width], dim=1)
    return sizes.contiguous().view(torch.int64).flatten(), values.contiguous().view(local.dtype)


def leave_layout() -> None:
    """Leaves megatron-core's groups but not the world; `init_parallel` may then make another layout."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()


def shutdown() -> None:
    """Leaves the process groups; a later `init_parallel` starts afresh."""
    leave_layout()
    if dist.is_initialized():
        dist.destroy_process_group()
