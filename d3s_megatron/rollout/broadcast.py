"""Weights to servers by one broadcast a bucket, in a group of the first rank and all servers (group.py).

Names, shapes and checksums go to each server by HTTP, and its answer comes back there, as with the other transports.
A bucket has arrived when every member said so. Where one does not, those that are gone or silent are given up, a group
of the others is made, and the bucket is sent again: the stream of weights is drawn once, whatever happens.
"""

from __future__ import annotations

import contextlib
import datetime
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from d3s_megatron.rollout import group as groups
from d3s_megatron.rollout.client import Client, Connection
from d3s_megatron.rollout.dispatch import Lost
from d3s_megatron.rollout.group import Backend, Group, Place
from d3s_megatron.rollout.weight_transport import BUCKET_BYTES, Outcome, outcome_of
from d3s_megatron.rollout.wire import Checksum, Pieces, buckets, describe, frame, last_frame

GRACE_SECONDS = 5.0  # a member that waited as long as it may still says so
POLL_SECONDS = 0.002

Value = TypeVar("Value")


class Broadcast:
    """The sender's end; keeps the group from one sync to the next, while the same servers hold it.

    Args:
        timeout: seconds after which a silent server is given up.
        device: of the trainer; NCCL is used where it and every server have a GPU of their own.
    """

    def __init__(self, timeout: float, device: torch.device) -> None:
        self.timeout, self.device = timeout, device
        self.group: Group | None = None
        self.members: tuple[str, ...] = ()  # addresses of its servers in the order of their ranks, from 1
        self._store: dist.TCPStore | None = None  # of all groups of this run
        self._num_groups = 0

    def send(
        self, clients: Sequence[Client], stream: Iterable[tuple[str, Tensor]], dtype: str, version: str
    ) -> tuple[Outcome, int]:
        """What became of each server that did not take the weights, and the number of bytes of these."""
        with contextlib.ExitStack() as stack:
            sync = _Sync(self, clients, version, stack)
            checksum = Checksum()
            device = torch.device("cuda" if sync.backend == "nccl" else "cpu")
            for number, held in enumerate(buckets(stream, dtype, BUCKET_BYTES, device)):
                header, flats = describe(held, dtype, checksum)
                flat = torch.cat([one.view(torch.uint8) for one in flats])
                sync.send(header | {"number": number, "num_bytes": len(flat)}, flat)
            return sync.finish(checksum), checksum.num_bytes

    def close(self) -> None:
        """Ends the group; its members notice."""
        if self.group is not None:
            self.group.close()
        self.group, self.members = None, ()

    def places(self, hosts: Sequence[str], backend: Backend) -> list[Place]:
        """The places of a new group: this rank's, and one for each server, which reaches this machine as `hosts`."""
        if self._store is None:
            timeout = datetime.timedelta(seconds=self.timeout)
            self._store = dist.TCPStore("127.0.0.1", 0, None, True, timeout, wait_for_workers=False)
        self._num_groups += 1
        name = f"{secrets.token_hex(4)}-{self._num_groups}"
        return [
            Place(name, rank, len(hosts) + 1, backend, host, self._store.port, self.timeout)
            for rank, host in enumerate(["127.0.0.1", *hosts])
        ]


class _Sync:
    """One sync: a call to every server that is well, and the group of those that are still with it."""

    def __init__(self, owner: Broadcast, clients: Sequence[Client], version: str, stack: contextlib.ExitStack) -> None:
        self._owner, self._version = owner, version
        self._outcome: Outcome = {}
        facts = self._each(clients, lambda client: client.health())
        self._lines = self._each([c for c in clients if c.address in facts], lambda client: _begin(client, version))
        for line in self._lines.values():
            stack.callback(line.close)
        devices = [facts[address]["device"] for address in self._lines]
        self.backend = groups.backend_for([groups.device_name(owner.device), *devices])
        held = {facts[address]["group"] for address in self._lines}
        if owner.group is not None and (owner.members != tuple(self._lines) or held != {owner.group.place.name}):
            owner.close()  # somebody is new, gone, or was in another run's group since

    def send(self, header: dict[str, Any], flat: Tensor) -> None:
        """One bucket to every server that is left."""
        what = groups.bucket_name(self._version, header["number"])
        while self._lines:
            group = self._owner.group or self._regroup()
            if group is None or not self._tell(dict.fromkeys(self._lines, frame(header | {"in": group.place.name}))):
                continue
            members = self._owner.members
            try:
                group.broadcast(flat)
            except RuntimeError:
                self._owner.close()  # so that those who wait for this rank fail too, and say so
            silent, broke = self._hear(group.store, what, members)
            if not silent and not broke:
                return
            self._give_up(silent or broke)

    def finish(self, checksum: Checksum) -> Outcome:
        """Ends the stream and waits for what every server says of it."""
        self._tell(dict.fromkeys(self._lines, last_frame(checksum)))
        with ThreadPoolExecutor(max(1, len(self._lines))) as pool:
            replies = {address: pool.submit(line.reply) for address, line in self._lines.items()}
            return self._outcome | outcome_of(replies, self._version, checksum)

    def _regroup(self) -> Group | None:
        """A group of all servers that are left; None where one of them did not come, and was given up."""
        members = tuple(self._lines)
        places = self._owner.places([self._lines[address].own_address for address in members], self.backend)
        store = groups.store_of(places[0])
        frames = {a: frame(groups.as_header(place)) for a, place in zip(members, places[1:], strict=True)}
        if not self._tell(frames):
            store.set(groups.GO, "no")
            return None
        silent, _ = self._hear(store, groups.HERE, members)
        store.set(groups.GO, "no" if silent else groups.YES)
        if silent:
            self._give_up(silent)
            return None
        try:
            self._owner.group = Group(places[0], self._lines[members[0]].own_address)
            self._owner.members = members
        except RuntimeError as failed:
            why = f"no group could be made: {groups.first_line(failed)}"
            self._give_up(self._gone(members) or dict.fromkeys(members, why))
        return self._owner.group

    def _tell(self, frames: dict[str, Pieces]) -> bool:
        """Sends each server its frame; whether all of them are still there."""
        gone = {}
        for address, pieces in frames.items():
            try:
                for piece in pieces:
                    self._lines[address].send(piece)
            except Lost as why:
                gone[address] = f"{why}"
        self._give_up(gone)
        return not gone

    def _hear(self, store: dist.Store, what: str, members: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
        """(those that are gone or said nothing, those that said why it failed): address -> reason."""
        waiting = {address: rank for rank, address in enumerate(members, start=1)}
        broke: dict[str, str] = {}
        deadline = time.monotonic() + self._owner.timeout + GRACE_SECONDS
        while waiting and time.monotonic() < deadline and not any(self._lines[a].is_gone() for a in waiting):
            for address, rank in list(waiting.items()):
                answer = groups.answer_of(store, what, rank)
                if answer is not None:
                    del waiting[address]
                    broke |= {address: answer} if answer != groups.YES else {}
            time.sleep(POLL_SECONDS)
        return self._gone(members) or dict.fromkeys(waiting, f"it said nothing for {self._owner.timeout:g} s"), broke

    def _gone(self, members: Sequence[str]) -> dict[str, str]:
        """Servers that have ended their call, with their last words."""
        gone = {}
        for address in members:
            if self._lines[address].is_gone():
                try:
                    gone[address] = f"it ended the call: {self._lines[address].reply()}"
                except (Lost, ValueError) as why:
                    gone[address] = f"{why}"
        return gone

    def _give_up(self, gone: dict[str, str]) -> None:
        if gone:
            self._owner.close()
        for address, why in gone.items():
            self._lines.pop(address).close()
            self._outcome[address] = Lost(why)

    def _each(self, clients: Sequence[Client], do: Callable[[Client], Value]) -> dict[str, Value]:
        """What `do` gives for each server by its address, all at once; those that are lost are left out."""
        with ThreadPoolExecutor(max(1, len(clients))) as pool:
            futures = {client.address: pool.submit(do, client) for client in clients}
        results = {}
        for address, future in futures.items():
            try:
                results[address] = future.result()
            except Lost as why:
                self._outcome[address] = why
        return results


def _begin(client: Client, version: str) -> Connection:
    line = client.connect()
    try:
        line.begin(f"/weights_broadcast?version={version}")
    except Lost:
        line.close()
        raise
    return line
