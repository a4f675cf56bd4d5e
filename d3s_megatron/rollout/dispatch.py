"""Shares jobs out over servers as they get free, the longest first; those of a lost server go to the others.

Longest first to the first that is free (list scheduling, R. L. Graham 1969) ends at most a third later than the best
plan would, where the lengths are known; here they are guessed from earlier answers.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

from d3s_megatron.types import Rollout

Job = TypeVar("Job")
Result = TypeVar("Result")


class Lost(Exception):
    """A server that cannot be asked any more; the text says why."""


class NoServerLeft(RuntimeError):
    """Every server is lost."""


class ExpectedLengths:
    """Mean answer length of each prompt so far, to guess its next answers by."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[int, int]] = {}  # prompt id -> answers, tokens
        self._num = self._tokens = 0

    def add(self, rollouts: Sequence[Rollout]) -> None:
        """Counts more answers."""
        for rollout in rollouts:
            num, tokens = self._sums.get(rollout.request.prompt.id, (0, 0))
            self._sums[rollout.request.prompt.id] = num + 1, tokens + len(rollout.token_ids)
            self._num, self._tokens = self._num + 1, self._tokens + len(rollout.token_ids)

    def __call__(self, prompt_id: str) -> float:
        """Tokens; the mean over all prompts for one that was never answered, 0 before any answer."""
        num, tokens = self._sums.get(prompt_id, (self._num, self._tokens))
        return tokens / max(1, num)


def dispatch(
    jobs: Sequence[Job],
    servers: Mapping[str, int],
    do: Callable[[str, Job], Result],
    lost: Callable[[str, Lost], None],
    done: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Results of the jobs, in their order; jobs are begun in their order too.

    Args:
        servers: name -> jobs it may have at once, each in a thread of its own.
        do: does one job by one server; raises `Lost` where the server is gone. Anything else it raises ends the whole.
        lost: told once of each server that is lost, from its thread.
        done: told of every result, one at a time.

    Raises:
        NoServerLeft: before every job was done.
    """
    return _Dispatch(jobs, servers, do, lost, done).run()


class _Dispatch(Generic[Job, Result]):
    def __init__(self, jobs, servers, do, lost, done) -> None:
        self._jobs, self._servers, self._do, self._lost, self._told = jobs, servers, do, lost, done
        self._waiting = deque(range(len(jobs)))
        self._results: dict[int, Result] = {}
        self._gone: set[str] = set()
        self._failed: BaseException | None = None
        self._changed = threading.Condition()

    def run(self) -> list[Result]:
        threads = [
            threading.Thread(target=self._work, args=(server,), daemon=True)
            for server, slots in self._servers.items()
            for _ in range(min(slots, len(self._jobs)))
        ]
        for thread in threads:
            thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._is_over() or len(self._gone) == len(self._servers))
        if self._failed is not None:
            raise self._failed
        if len(self._results) < len(self._jobs):
            raise NoServerLeft(f"{len(self._jobs) - len(self._results)} of {len(self._jobs)} prompts have no answers")
        return [self._results[i] for i in range(len(self._jobs))]

    def _is_over(self) -> bool:
        return self._failed is not None or len(self._results) == len(self._jobs)

    def _work(self, server: str) -> None:
        while (job := self._take(server)) is not None:
            try:
                result = self._do(server, self._jobs[job])
            except Lost as why:
                self._give_back(server, job, why)
                return
            except BaseException as failed:
                with self._changed:
                    self._failed = self._failed or failed
                    self._changed.notify_all()
                return
            with self._changed:
                self._told(result)
                self._results[job] = result
                self._changed.notify_all()

    def _take(self, server: str) -> int | None:
        """The next job; None once all are done, or the server is gone. Waits while another may still come back."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_over() or server in self._gone)
            if self._is_over() or server in self._gone:
                return None
            return self._waiting.popleft()

    def _give_back(self, server: str, job: int, why: Lost) -> None:
        with self._changed:
            self._waiting.appendleft(job)
            if server not in self._gone:
                self._gone.add(server)
                self._lost(server, why)
            self._changed.notify_all()
