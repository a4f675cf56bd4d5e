"""The processes of an evaluation: they take chunks of work from one counter, and meet before and after.

No megatron here: an evaluation needs a model folder and an engine. The processes share the output folder.
"""

from __future__ import annotations

import datetime
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

LONGEST_WAIT = datetime.timedelta(days=2)  # for the slowest process; torchrun ends all when one has died


@dataclass(frozen=True)
class World:
    """This process's place, and what it shares with the others."""

    rank: int
    size: int
    device: torch.device
    next_chunk: Callable[[], int]  # 0, 1, 2, ...: each number is given to one process
    meet: Callable[[], None]  # waits until every process is here

    def close(self) -> None:
        """Leaves the process group, if there is one."""
        if dist.is_initialized():
            dist.destroy_process_group()


def join(needs_group: bool = False) -> World:
    """Joins the processes that torchrun started; without it, a world of one.

    `needs_group` makes a process group there too (vLLM joins it).
    """
    rank, size = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if size == 1 and not needs_group:
        return World(rank, size, device, itertools.count().__next__, lambda: None)
    if "RANK" not in os.environ:
        store = dist.TCPStore("127.0.0.1", 0, 1, True, timeout=LONGEST_WAIT)
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port))
    else:
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(host, port, size, rank == 0 and not agent, timeout=LONGEST_WAIT)
    # torchrun hands the same store to processes that it starts again: they count from 0 under another name.
    shared = dist.PrefixStore(f"evaluate-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=shared, rank=rank, world_size=size, timeout=LONGEST_WAIT)
    meetings = itertools.count()

    def meet() -> None:  # over the store: vLLM ends the process group with its engine
        name = f"meeting {next(meetings)}"
        if shared.add(f"{name}, how many", 1) == size:
            shared.set(name, "all here")
        shared.wait([name], LONGEST_WAIT)

    return World(rank, size, device, lambda: shared.add("next chunk", 1) - 1, meet)
