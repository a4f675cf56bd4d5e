"""A process group of a run's first rank and its rollout servers, apart from the job's own; weights go through it once.

The first rank hosts a store by which the group is made and every member says what it has received. A member that is
gone breaks the group for all: it is closed, and another one is made without that member.
"""

from __future__ import annotations

import datetime
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from d3s_megatron.rollout.wire import WeightReader

Backend = Literal["gloo", "nccl"]

YES = "yes"  # what a member says of an operation that went well; anything else is why it did not
HERE, GO = "here", "go"  # a member has come; the sender knows of all and goes on


@dataclass(frozen=True)
class Place:
    """A member's place in a group; it goes to a server as JSON."""

    name: str
    rank: int  # 0 is the sender
    size: int
    backend: Backend
    host: str  # of the store, as the member reaches it
    port: int
    timeout: float  # seconds that any one operation may take


class Group:
    """This process's end of a group; every failure is a RuntimeError, within the timeout.

    Args:
        own_address: the address of this machine at which other members reach it, for gloo (GLOO_SOCKET_IFNAME goes
            before it, where it is set).
    """

    def __init__(self, place: Place, own_address: str) -> None:
        """Waits until the sender says that every member is there; it makes its own end when it knows so."""
        self.place = place
        timeout = datetime.timedelta(seconds=place.timeout)
        self.store = store_of(place)
        if place.rank:
            self.say(HERE, YES)
            if self.store.get(GO).decode() != YES:
                raise RuntimeError("the sender called it off, as a member did not come")
        make = _nccl if place.backend == "nccl" else _gloo
        self.device = (
            torch.device("cuda", torch.cuda.current_device()) if place.backend == "nccl" else torch.device("cpu")
        )

        def connect() -> None:
            self._group = make(dist.PrefixStore("mesh", self.store), place, own_address, timeout)
            self.broadcast(torch.zeros(1, dtype=torch.uint8, device=self.device))  # NCCL connects only now

        _within(place.timeout, connect)

    def broadcast(self, flat: Tensor) -> None:
        """Sends the bytes [n] uint8 of the first member to all others, in place."""
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._group.broadcast([flat], options).wait()
        if flat.is_cuda:
            torch.cuda.current_stream(flat.device).synchronize()  # received means received

    def say(self, what: str, answer: str) -> None:
        """Tells the sender what became of `what` at this member."""
        self.store.set(f"{what}/{self.place.rank}", answer)

    def close(self) -> None:
        """Ends the connections, so that members that still wait for this one fail at once."""
        self._group.abort()
        del self._group


def _within(seconds: float, do: Callable[[], None]) -> None:
    """Runs `do` in a thread, or gives it up with a RuntimeError: NCCL waits forever for a member that has died."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            do()
            done.set_result(None)
        except BaseException as failed:
            done.set_exception(failed)

    threading.Thread(target=run, name="connecting", daemon=True).start()
    try:
        done.result(timeout=seconds)
    except TimeoutError:
        raise RuntimeError(f"not every member was there after {seconds:g} s") from None


def store_of(place: Place) -> dist.Store:
    """What the members of a group tell one another."""
    timeout = datetime.timedelta(seconds=place.timeout)
    return dist.PrefixStore(place.name, dist.TCPStore(place.host, place.port, None, False, timeout))


def answer_of(store: dist.Store, what: str, rank: int) -> str | None:
    """What a member said of `what`, once; None where it has not yet."""
    key = f"{what}/{rank}"
    if not store.check([key]):
        return None
    answer = store.get(key).decode()
    store.delete_key(key)
    return answer


def _gloo(store: dist.Store, place: Place, own_address: str, timeout: datetime.timedelta) -> Any:
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    where = {"interface": interface} if interface else {"hostname": own_address}
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stub lacks it
    options._devices = [dist.ProcessGroupGloo.create_device(**where)]
    options._threads, options._timeout = 2, timeout
    return dist.ProcessGroupGloo(store, place.rank, place.size, options)


def _nccl(store: dist.Store, place: Place, own_address: str, timeout: datetime.timedelta) -> Any:
    with _environment("TORCH_NCCL_BLOCKING_WAIT", "1"):  # a timeout is then an exception, and not the process's end
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, place.rank, place.size, options)


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def device_name(device: torch.device) -> str:
    """A device by a name that no other one has: "cpu", or "cuda" and the GPU's own number."""
    return f"cuda {torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else "cpu"


def backend_for(devices: list[str]) -> Backend:
    """NCCL where every member has a GPU of its own, which it insists on; else gloo."""
    distinct = len(set(devices)) == len(devices)
    return "nccl" if distinct and all(name.startswith("cuda") for name in devices) else "gloo"


class Membership:
    """A server's place in the group of the run that asked last; kept from one sync to the next."""

    def __init__(self) -> None:
        self._group: Group | None = None

    @property
    def name(self) -> str:
        """Of the group; empty without one."""
        return "" if self._group is None else self._group.place.name

    def join(self, asked: dict[str, Any], own_address: str) -> None:
        """Takes a place; a failure leaves this server without one, and the sender without its answer."""
        self.leave()
        try:
            self._group = Group(Place(**asked), own_address)
        except RuntimeError as failed:
            print(f"  did not join the group of a run's weights: {failed}", file=sys.stderr, flush=True)

    def receive(self, name: str, what: str, num_bytes: int) -> Tensor | None:
        """Bytes [n] uint8 of the sender, in the group `name`; None where it broke, of which the sender hears.

        ConnectionError where this server is not in that group, or the sender is gone.
        """
        if self._group is None or self.name != name:
            raise ConnectionError("a bucket came in a group that this server has not joined, or has left")
        group, flat = self._group, torch.empty(num_bytes, dtype=torch.uint8, device=self._group.device)
        answer = YES
        try:
            group.broadcast(flat)
        except RuntimeError as broken:
            self.leave()
            answer = first_line(broken)
        try:
            group.say(what, answer)
        except RuntimeError as gone:
            raise ConnectionError(f"the sender of the weights is gone: {first_line(gone)}") from gone
        return flat if answer == YES else None

    def leave(self) -> None:
        """Ends this server's part in the group."""
        if self._group is not None:
            self._group.close()
            self._group = None


class BroadcastReader(WeightReader):
    """Reads a stream whose headers come by HTTP, and whose buckets come by broadcast.

    A frame is a place to take ({"group": ...}), a bucket's header with its number, or the end. A bucket that could not
    be received comes again, in another group.
    """

    def __init__(self, source, version: str, membership: Membership, own_address: str) -> None:
        super().__init__(source)
        self._version, self._membership, self._own_address = version, membership, own_address
        self._num_received = 0

    def _take(self, header: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Tensor]]:
        if "group" in header:
            self._membership.join(header["group"], self._own_address)
            return
        number = header["number"]
        what = bucket_name(self._version, number)
        flat = self._membership.receive(header["in"], what, header["num_bytes"])
        if flat is not None and number == self._num_received:
            self._num_received += 1
            yield header, flat


def first_line(failed: BaseException) -> str:
    """An error of a process group without the stack it brings."""
    return f"{failed}".splitlines()[0][:200] if f"{failed}" else type(failed).__name__


def bucket_name(version: str, number: int) -> str:
    """By which members speak of a bucket of the weights of that name."""
    return f"{version}/{number}"


def as_header(place: Place) -> dict[str, Any]:
    """What tells a server to take a place."""
    return {"group": asdict(place)}
