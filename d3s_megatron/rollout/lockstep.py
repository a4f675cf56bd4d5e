"""One vLLM engine over the ranks of a server: the first rank leads, the others do what it does, in the same order.

Every rank holds a shard of the model and the whole schedule. Equal requests in an equal order, with equal seeds and
logits, make all of them draw the same tokens; only the leader's are sent anywhere. Weights come to the leader, which
broadcasts them one tensor at a time; each rank takes its shard.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from d3s_megatron.rollout.engine import Sampling
from d3s_megatron.types import Request, Rollout

IDLE = datetime.timedelta(days=365)  # followers wait as long as a server has nothing to do


def join() -> int:
    """Joins the processes that torchrun started for this server; their number, 1 without torchrun."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=IDLE)
        return dist.get_world_size()
    return 1


class Leader:
    """The engine of the first rank, as one that every rank runs; see `VllmEngine` for the methods.

    It has no `generate`: a server goes step by step.
    """

    def __init__(self, engine: Any) -> None:
        self._engine, self.name = engine, f"{engine.name} on {dist.get_world_size()} ranks"
        self.device = engine.device

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> list[str]:
        """Queues requests."""
        _say("submit", list(requests), sampling)
        return self._engine.submit(requests, sampling)

    def step(self) -> list[tuple[str, Callable[[Request], Rollout]]]:
        """One decoding step."""
        _say("step")
        return self._engine.step()

    def abort(self) -> None:
        """Forgets what was submitted."""
        _say("abort")
        self._engine.abort()

    def load_weights(self, stream: Iterable[tuple[str, Tensor]]) -> None:
        """Replaces every weight on every rank."""
        _say("load_weights")
        self._engine.load_weights(_told(stream))

    def rest(self) -> None:
        """Does nothing: nobody else wants a server's devices."""

    def close(self) -> None:
        """Ends the followers too."""
        _say("close")
        self._engine.close()


def follow(engine: Any) -> None:
    """What every rank but the first does, until the leader closes."""
    while True:
        what, arguments = _hear()
        try:
            if what == "load_weights":
                engine.load_weights(_heard())
            else:
                getattr(engine, what)(*arguments)
        except (ValueError, ConnectionError):
            pass  # the leader meets the same, and answers with it
        if what == "close":
            return


def _say(what: str, *arguments: Any) -> None:
    dist.broadcast_object_list([what, arguments], src=0, device=torch.device("cpu"))


def _hear() -> tuple[str, Sequence[Any]]:
    box: list[Any] = [None, None]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0], box[1]


def _told(stream: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The stream on the leader, each tensor also sent to the others; so is what ends it, whole or not."""
    try:
        for name, tensor in stream:
            tensor = tensor.detach().cpu().contiguous()
            _say("weight", name, tuple(tensor.shape), tensor.dtype)
            dist.broadcast(tensor, src=0)
            yield name, tensor
    except (ValueError, OSError) as wrong:
        _say("broken", repr(wrong))
        raise
    except GeneratorExit:  # the engine refused a weight: so do the others, at the same one
        raise
    _say("end")


def _heard() -> Iterator[tuple[str, Tensor]]:
    while True:
        what, arguments = _hear()
        if what == "broken":
            raise ValueError(arguments[0])
        if what == "end":
            return
        name, shape, dtype = arguments
        tensor = torch.empty(shape, dtype=dtype)
        dist.broadcast(tensor, src=0)
        yield name, tensor
