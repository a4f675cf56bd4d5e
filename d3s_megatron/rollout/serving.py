"""The thread of a rollout server that owns the engine: answers calls one step at a time, and takes new weights.

Every call names the weights it wants. Those that wait when new weights come are answered with `Stale`: nobody may use
answers of old weights under a new name.
"""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor

from d3s_megatron.rollout.engine import RolloutEngine, Sampling
from d3s_megatron.types import Request, Rollout


@runtime_checkable
class StepwiseEngine(Protocol):
    """An engine that takes new requests between two decoding steps; see `VllmEngine` and `lockstep.Leader`."""

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> list[str]: ...
    def step(self) -> list[tuple[str, Callable[[Request], Rollout]]]: ...
    def abort(self) -> None: ...
    def load_weights(self, stream: Iterable[tuple[str, Tensor]]) -> None: ...
    def close(self) -> None: ...


class Stale(RuntimeError):
    """The server does not hold the weights that were asked for."""


@dataclass(eq=False)
class Call:
    """Requests that are waited for together."""

    requests: Sequence[Request]
    sampling: Sampling
    version: str
    rollouts: Future = field(default_factory=Future)  # of list[Rollout]


@dataclass(eq=False)
class Weights:
    """New weights, called `version` from then on."""

    stream: Iterable[tuple[str, Tensor]]
    version: str
    loaded: Future = field(default_factory=Future)  # of None


class Worker:
    """Runs an engine in a thread of its own; everything else talks to it through `put`."""

    def __init__(self, engine: RolloutEngine | StepwiseEngine) -> None:
        self.version = ""  # no weights that a run knows by name
        self._engine = engine
        self._jobs: queue.SimpleQueue[Call | Weights | _End] = queue.SimpleQueue()
        self._running = _Stepwise(engine) if isinstance(engine, StepwiseEngine) else _AtOnce(engine)
        self.thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.thread.start()

    @property
    def num_waiting(self) -> int:
        """Requests the engine works on."""
        return self._running.num_requests

    def put(self, job: Call | Weights) -> None:
        """Queues a call or new weights; their future says what became of them."""
        self._jobs.put(job)

    def close(self) -> None:
        """Ends the thread after the job that runs, and frees the engine."""
        self._jobs.put(_End())
        self.thread.join()
        self._engine.close()

    def _run(self) -> None:
        """Until `close`; also ends where the engine itself fails, since its state is then unknown."""
        try:
            while True:
                job = self._next()
                if isinstance(job, _End):
                    return
                if isinstance(job, Call):
                    self._answer(job)
                elif isinstance(job, Weights):
                    self._load(job)
                else:
                    self._running.advance()
        except BaseException as failed:
            traceback.print_exc()
            self._running.abort(failed)

    def _next(self) -> Call | Weights | _End | None:
        """The next job; None where there is none and the engine has something to do."""
        try:
            return self._jobs.get(block=self._running.num_requests == 0)
        except queue.Empty:
            return None

    def _answer(self, call: Call) -> None:
        if call.version != self.version:
            call.rollouts.set_exception(Stale(f"asked for weights {call.version!r}, there are {self.version!r}"))
            return
        try:
            self._running.start(call)
        except ValueError as refused:
            call.rollouts.set_exception(refused)

    def _load(self, weights: Weights) -> None:
        self._running.abort(Stale(f"weights {weights.version!r} came meanwhile"))
        self.version = ""
        try:
            self._engine.load_weights(weights.stream)
        except (ValueError, OSError) as wrong:  # a wrong stream, or one that was cut off
            weights.loaded.set_exception(wrong)
            return
        self.version = weights.version
        weights.loaded.set_result(None)


class _End:
    """The last job."""


class _AtOnce:
    """For an engine that answers a whole batch in one call."""

    num_requests = 0

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine

    def start(self, call: Call) -> None:
        call.rollouts.set_result(self._engine.generate(call.requests, call.sampling))

    def advance(self) -> None:
        raise AssertionError("nothing is ever left to do")

    def abort(self, why: BaseException) -> None:
        """Nothing runs between two jobs."""


class _Stepwise:
    """For an engine that takes new requests between two decoding steps: calls of several ranks run together."""

    def __init__(self, engine: StepwiseEngine) -> None:
        self._engine = engine
        self._slots: dict[str, tuple[Call, int]] = {}
        self._done: dict[Call, dict[int, Rollout]] = {}

    @property
    def num_requests(self) -> int:
        return len(self._slots)

    def start(self, call: Call) -> None:
        keys = self._engine.submit(call.requests, call.sampling)
        self._slots |= {key: (call, i) for i, key in enumerate(keys)}
        self._done[call] = {}

    def advance(self) -> None:
        for key, answer in self._engine.step():
            call, i = self._slots.pop(key)
            done = self._done[call]
            done[i] = answer(call.requests[i])
            if len(done) == len(call.requests):
                call.rollouts.set_result([done[i] for i in range(len(done))])
                del self._done[call]

    def abort(self, why: BaseException) -> None:
        if self._slots and isinstance(why, Stale):
            self._engine.abort()
        for call in self._done:
            call.rollouts.set_exception(why)
        self._slots.clear()
        self._done.clear()
