"""Judging in processes that can be killed: results in order, a hard deadline an answer, nothing left behind.

Rules:
- An answer has `deadline_seconds` in all. The first try may use FIRST_TRY of it; what hangs or crashes there is tried
  once more in the rest, in another process. Then its status is `timeout` or `crash` and it has no value.
- `num_workers` answers are judged at a time. One that takes longer than a moment no longer counts: it keeps its own
  process until its deadline, and another worker takes the place, so one hostile answer in eight does not hold up the
  rest. At most EXTRA such processes stand beside the working ones. (Their priority is not lowered: on a loaded machine
  an honest answer that was slow once would never get its turn, and the reward would depend on the load.)
- A worker is replaced after ANSWERS_PER_WORKER answers, so that caches of the mathematics library cannot grow for ever.
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from d3s_megatron.rewards.nursery import receive_int, receive_message, send_int, send_message

FIRST_TRY = 0.4  # shares of the deadline; the retry gets the larger one, as it is there for a loaded machine
SECOND_TRY = 0.5  # what is left over pays for killing, forking and waiting for a place
EXTRA = 32  # slow answers that may keep a process each, beside the working ones
ANSWERS_PER_WORKER = 5000
MOST_AT_ONCE = 16  # answers handed to a worker in one message; it replies to each
_SLOW_SECONDS = 0.1  # longer than ordinary answers take; doubled in a batch at every false alarm
_MOST_REASONS = 5  # of crashes that are logged for a batch
_SETUP = """
import json, sys
sys.path[:] = json.loads(sys.argv[3])
from d3s_megatron.rewards.nursery import main
main(int(sys.argv[1]), int(sys.argv[2]))
"""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Judged:
    """What became of one answer; `value` is None for timeout and crash."""

    value: float | None
    status: str


@dataclass(frozen=True)
class _Job:
    index: int
    retry: bool = False


@dataclass(eq=False)
class _Worker:
    pid: int
    sock: socket.socket
    generation: int  # of the nursery that raised it
    num_answers: int = 0
    jobs: deque[_Job] = field(default_factory=deque)  # handed out; it is at the first
    started: float = 0.0  # when it began the first
    slow: bool = False  # it no longer counts as working
    ends: bool = False  # after this answer, as what else it was given has gone to others


class WorkerPool:
    """Workers that run `judge` (`module:function` of (text, gold)); safe to call from any thread, one call at a time.

    Args:
        judge: import path; it returns a value, or (value, status).
        num_workers: answers judged side by side.
        deadline_seconds: for one answer, retry included.
        memory_limit_mb: address space of one worker; 0 for no limit.

    Raises:
        ValueError: the judge cannot be imported.
    """

    def __init__(self, judge: str, num_workers: int, deadline_seconds: float, memory_limit_mb: int) -> None:
        self._num_workers = num_workers
        self._deadline = deadline_seconds
        self._slow = self._slow_at_first = min(_SLOW_SECONDS, deadline_seconds / 10)
        self._generation = 0
        self._settings = {"judge": judge, "memory_limit_mb": memory_limit_mb}
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self._closed = False
        self._start_nursery()

    def map(self, items: Sequence[tuple[str, str]]) -> list[Judged]:
        """Judge every (text, gold); results in the order of `items`."""
        with self._lock:
            if self._closed:
                raise RuntimeError("this pool of reward workers has been closed")
            try:
                return self._run(items)
            finally:  # an interrupt must not leave an answer of this call to be read by the next
                for worker in list(self._busy):
                    self._discard(worker)

    def close(self) -> None:
        """End every process of the pool; a second call does nothing."""
        with self._lock:
            self._closed = True
            for worker in self._idle:
                worker.sock.close()
            self._idle.clear()
            self._end_nursery()

    def _run(self, items: Sequence[tuple[str, str]]) -> list[Judged]:
        results: list[Judged | None] = [None] * len(items)
        waiting = deque(_Job(index) for index in range(len(items)))
        retries: deque[_Job] = deque()
        crashes: Counter[str] = Counter()
        self._slow = self._slow_at_first
        with selectors.DefaultSelector() as selector:

            def hand_out(jobs: list[_Job]) -> None:
                worker = self._hand_out(items, jobs)
                selector.register(worker.sock, selectors.EVENT_READ, worker)

            def stop(worker: _Worker, status: str) -> None:
                """End a worker that hangs or crashed; the answer it was at is tried again or given up."""
                selector.unregister(worker.sock)
                job, *others = worker.jobs
                self._discard(worker)
                waiting.extendleft(reversed(others))
                if job.retry:
                    results[job.index] = Judged(None, status)
                else:
                    retries.append(_Job(job.index, retry=True))

            while waiting or retries or self._busy:
                while retries and len(self._busy) < self._num_workers + EXTRA:
                    hand_out([retries.popleft()])
                working = sum(not worker.slow for worker in self._busy)
                while waiting and working < self._num_workers and len(self._busy) < self._num_workers + EXTRA:
                    num = min(len(waiting), MOST_AT_ONCE, 1 + len(waiting) // (4 * self._num_workers))
                    hand_out([waiting.popleft() for _ in range(num)])
                    working += 1

                for key, _ in selector.select(self._next_check(time.monotonic())):
                    worker: _Worker = key.data
                    job = worker.jobs[0]
                    try:
                        value, status, message = receive_message(worker.sock)
                    except (EOFError, ConnectionResetError):
                        value, status, message = None, "crash", "the worker process died"
                    if status == "crash":
                        crashes[message] += 1
                        stop(worker, "crash")  # its memory may be in any state
                        continue
                    results[job.index] = Judged(value, status)
                    if worker.slow:  # a false alarm, as on a loaded machine: be slower to raise the next
                        self._slow = min(2 * self._slow, FIRST_TRY * self._deadline / 2)
                    worker.num_answers += 1
                    worker.started = time.monotonic()
                    worker.jobs.popleft()
                    if not worker.jobs:
                        selector.unregister(worker.sock)
                        self._take_back(worker)

                now = time.monotonic()
                for worker in list(self._busy):
                    if now - worker.started > self._limit(worker):
                        stop(worker, "timeout")
                    elif not worker.slow and now - worker.started > self._slow:
                        worker.slow = True
                        while len(worker.jobs) > 1:  # the rest need not wait for it
                            waiting.appendleft(worker.jobs.pop())
                            worker.ends = True
        for message, num in crashes.most_common(_MOST_REASONS):
            logger.warning("judging crashed %d times in a batch of %d answers: %s", num, len(items), message)
        assert all(result is not None for result in results)
        return results  # type: ignore[return-value]

    def _limit(self, worker: _Worker) -> float:
        return self._deadline * (SECOND_TRY if worker.jobs[0].retry else FIRST_TRY)

    def _next_check(self, now: float) -> float | None:
        times = [worker.started + (self._limit(worker) if worker.slow else self._slow) for worker in self._busy]
        return max(0.0, min(times) - now) + 0.001 if times else None

    def _hand_out(self, items: Sequence[tuple[str, str]], jobs: list[_Job]) -> _Worker:
        message = [items[job.index] for job in jobs]
        worker = self._idle.pop() if self._idle else self._spawn()
        try:
            send_message(worker.sock, message)
        except (BrokenPipeError, ConnectionResetError):  # it died while idle, perhaps by the kernel's memory killer
            self._discard(worker)
            worker = self._spawn()
            send_message(worker.sock, message)
        worker.jobs.extend(jobs)
        worker.started = time.monotonic()
        self._busy.add(worker)
        if jobs[0].retry:
            worker.slow = True  # it is known for a hard one, and needs no place among the working
        return worker

    def _take_back(self, worker: _Worker) -> None:
        self._busy.discard(worker)
        worker.slow = False
        if worker.ends or worker.num_answers >= ANSWERS_PER_WORKER or len(self._idle) >= self._num_workers:
            self._discard(worker)
        else:
            self._idle.append(worker)

    def _spawn(self) -> _Worker:
        try:
            return self._fork_worker()
        except (BrokenPipeError, ConnectionResetError, EOFError):  # the nursery was killed, and its workers with it
            logger.warning("the process that raises reward workers died; starting another")
            for worker in self._idle:
                worker.sock.close()
            self._idle.clear()
            self._end_nursery()
            self._start_nursery()
            return self._fork_worker()

    def _fork_worker(self) -> _Worker:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._control, [b"s"], [theirs.fileno()])
                return _Worker(receive_int(self._control), ours, self._generation)
        except BaseException:
            ours.close()
            raise

    def _discard(self, worker: _Worker) -> None:
        self._busy.discard(worker)
        worker.jobs.clear()
        worker.sock.close()
        if worker.generation != self._generation:
            return  # it died with its nursery, and its process id may be another's by now
        try:
            self._control.sendall(b"k")
            send_int(self._control, worker.pid)
        except (BrokenPipeError, ConnectionResetError, EOFError):
            pass  # no nursery, no worker; the next spawn starts another

    def _start_nursery(self) -> None:
        self._generation += 1
        ours, theirs = socket.socketpair()
        path = json.dumps([os.path.abspath(entry) for entry in sys.path])
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", _SETUP, str(theirs.fileno()), str(os.getpid()), path],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # what a reward function prints must not mix with the program's output
                start_new_session=True,  # Ctrl-C is for the trainer, which then closes the pool
                # Fixed hashing: the same verdict for the same answer in every run. One thread: many small processes.
                env={**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )
        self._control = ours
        self._end_nursery = weakref.finalize(self, _end, ours, process)
        send_message(ours, self._settings)
        try:
            error = receive_message(ours)["error"]
        except (EOFError, ConnectionResetError):
            error = f"the process ended with status {process.wait()}"
        if error is not None:
            self._end_nursery()
            raise ValueError(
                f"rewards: cannot load {self._settings['judge']!r}: {error}; check the module and its name"
            )


def _end(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    control.close()
    process.wait()
