"""Rollouts by servers outside of the job (`python -m d3s_megatron.rollout.serve`), reached by HTTP from every rank.

1. The first rank sends the weights to every server before the first answer and after every update, under a new name;
   what each server has read is checked by checksum.
2. Every rank shares its prompts out over the servers that took them. A call names the weights it wants, so an answer
   of other weights cannot come back.
3. A server that does not answer, or holds other weights, is named and left out until the next weights are sent; its
   prompts go to the others. With none left the run ends.
"""

from __future__ import annotations

import itertools
import math
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from d3s_megatron.convert import read_shape
from d3s_megatron.rollout.broadcast import Broadcast
from d3s_megatron.rollout.client import Client
from d3s_megatron.rollout.config import RolloutConfig
from d3s_megatron.rollout.dispatch import ExpectedLengths, Lost, NoServerLeft, dispatch
from d3s_megatron.rollout.engine import Sampling
from d3s_megatron.rollout.progress import ProgressLine
from d3s_megatron.rollout.serve import shape_facts
from d3s_megatron.rollout.weight_transport import Outcome, by_folder, by_stream
from d3s_megatron.types import Request, Rollout

POLL_SECONDS = 1.0
RESTART = "start them again, and the same command goes on from the last checkpoint"
CPU = torch.device("cpu")
MAX_CONNECTIONS = 64  # of one rank to one server

Share = Callable[[Any], Any]  # the first rank's value, on every rank


class ServerEngine:
    """A RolloutEngine whose engines run elsewhere; see `engine.py` for what it promises.

    `load_weights` is a collective where there are several ranks; `generate` is not, and may run in a thread.
    """

    def __init__(
        self,
        folder: str | Path,
        config: RolloutConfig,
        max_model_len: int,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        share: Share = lambda value: value,
        device: torch.device = CPU,
    ) -> None:
        """Waits until every server of `rollout.servers` answers; ValueError names those that do not, or do not fit."""
        self._folder, self._config, self._rank, self._share = Path(folder), config, rank, share
        self._num_ranks = num_ranks
        self._clients = {address: Client(address, config.server_timeout) for address in config.server_addresses()}
        self._alive: tuple[str, ...] = ()
        self._lengths = ExpectedLengths()
        run = share(secrets.token_hex(4))
        self._versions = (f"{run}-{i}" for i in itertools.count())
        self._version = ""
        self._broadcast = Broadcast(config.server_timeout, device)  # waits for the first sync before it does anything
        self.sync_bytes = 0  # sent to each server, all weights so far
        wrong = share(self._first_look(max_model_len) if rank == 0 else None)
        if wrong:
            raise ValueError(wrong)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """One rollout a request, in request order (contract in `engine.py`); NoServerLeft where all are lost."""
        if not self._alive:
            raise NoServerLeft("no rollout server holds the weights of this run; send them first")
        if not requests:
            return []
        groups: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault((request.group_id, request.prompt.token_ids), []).append(i)
        jobs = sorted(groups.values(), key=lambda job: -len(job) * self._lengths(requests[job[0]].prompt.id))
        at_once = math.ceil(self._config.max_batch_size / (max(map(len, jobs)) * self._num_ranks))
        progress, num_done, num_tokens = ProgressLine(len(requests)), 0, 0

        def done(rollouts: list[Rollout]) -> None:
            nonlocal num_done, num_tokens
            num_done, num_tokens = num_done + len(rollouts), num_tokens + sum(len(r.token_ids) for r in rollouts)
            progress.update(num_done, num_tokens)

        def ask(address: str, job: list[int]) -> list[Rollout]:
            return self._clients[address].generate([requests[i] for i in job], sampling, self._version)

        try:
            results = dispatch(jobs, dict.fromkeys(self._alive, min(at_once, MAX_CONNECTIONS)), ask, self._lost, done)
        except NoServerLeft as none:
            raise NoServerLeft(f"no rollout server is left of {', '.join(self._clients)}: {none}; {RESTART}") from None
        answers: dict[int, Rollout] = {
            i: rollout for job, part in zip(jobs, results, strict=True) for i, rollout in zip(job, part, strict=True)
        }
        rollouts = [answers[i] for i in range(len(requests))]
        self._lengths.add(rollouts)
        return rollouts

    def ask_each(self, requests: Sequence[Request], sampling: Sampling) -> list[tuple[str, Rollout]]:
        """Every server's answers to all requests, asked by the first rank; a server that is lost meanwhile is named."""
        if self._rank:
            return []
        answers: list[tuple[str, Rollout]] = []
        with ThreadPoolExecutor(max(1, len(self._alive))) as pool:
            asked = {a: pool.submit(self._clients[a].generate, requests, sampling, self._version) for a in self._alive}
        for address, future in asked.items():
            try:
                answers += [(address, rollout) for rollout in future.result()]
            except Lost as why:
                self._lost(address, why)
        return answers

    def load_weights(self, stream: Iterable[tuple[str, Tensor]]) -> None:
        """Sends every weight to all servers that answer, those lost before included (contract in `engine.py`).

        Every rank calls it with its end of a collective stream. NoServerLeft where no server took the weights;
        ValueError where one refused them.
        """
        self._version = next(self._versions)
        outcome: Outcome = {}
        if self._rank == 0:
            outcome, num_bytes = self._send(stream)
            self.sync_bytes += num_bytes
        else:
            for _ in stream:
                pass
        outcome = self._share(outcome)
        for address, failed in outcome.items():
            if isinstance(failed, ValueError):
                raise ValueError(f"rollout server {address} refused the weights: {failed}")
        before, self._alive = self._alive, tuple(a for a in self._clients if a not in outcome)
        if self._rank == 0:
            for address in self._clients:
                if address in outcome:
                    _say(f"rollout server {address} did not take the weights: {outcome[address]}")
                elif before and address not in before:
                    _say(f"rollout server {address} is back")
        if not self._alive:
            raise NoServerLeft(f"no rollout server took the weights, of {', '.join(self._clients)}; {RESTART}")

    def _send(self, stream: Iterable[tuple[str, Tensor]]) -> tuple[Outcome, int]:
        clients, dtype = list(self._clients.values()), self._config.dtype
        if self._config.weight_transport == "folder":
            return by_folder(clients, stream, dtype, self._version, Path(self._config.sync_folder), self._folder)
        if self._config.weight_transport == "broadcast":
            return self._broadcast.send(clients, stream, dtype, self._version)
        return by_stream(clients, stream, dtype, self._version)

    def rest(self) -> None:
        """Does nothing: the servers have devices of their own."""

    def close(self) -> None:
        """Forgets the servers; they go on, and another run may send them its weights."""
        self._alive = ()
        self._broadcast.close()

    def _lost(self, address: str, why: Lost) -> None:
        self._alive = tuple(a for a in self._alive if a != address)
        others = f"its prompts go to {', '.join(self._alive)}" if self._alive else "there is no other"
        _say(f"rollout server {address} is lost to rank {self._rank} ({why}); {others}")

    def _first_look(self, max_model_len: int) -> str | None:
        """What is wrong with a server, in words; waits up to `rollout.server_patience` for all of them to answer."""
        deadline, mine = time.monotonic() + self._config.server_patience, shape_facts(read_shape(self._folder))
        said = False
        for address, client in self._clients.items():
            while True:
                try:
                    facts = client.health()
                    break
                except Lost as why:
                    if time.monotonic() > deadline:
                        return (
                            f"rollout.servers: {address} does not answer ({why}): start it with "
                            "python -m d3s_megatron.rollout.serve"
                        )
                    if not said:
                        _say(f"waiting for rollout server {address} ({why})")
                        said = True
                    time.sleep(POLL_SECONDS)
            theirs = facts["shape"]
            other = [
                f"{name} {theirs.get(name)} instead of {mine[name]}" for name in mine if theirs.get(name) != mine[name]
            ]
            if other:
                return f"rollout.servers: {address} serves another model: {', '.join(other)}"
            if facts["max_model_len"] < max_model_len:
                return (
                    f"rollout.servers: {address} takes {facts['max_model_len']} tokens of prompt and answer, this run "
                    f"needs {max_model_len}: start it with --max-model-len {max_model_len}"
                )
            if facts["dtype"] != self._config.dtype:
                return (
                    f"rollout.servers: {address} computes in {facts['dtype']}, rollout.dtype is {self._config.dtype}: "
                    "make them the same"
                )
        return None


def _say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)
