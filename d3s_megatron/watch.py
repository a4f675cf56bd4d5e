"""Knows in which phase every rank is, speaks up when one stays too long, and keeps each rank's own log.

    OUTPUT_DIR/ranks/rank-00003.log   the stacks of that rank at a stall, and the exception that ended it

A rank tells the process group's store when it enters a phase, and, once that takes long, whether its main thread is
inside a call to the others. A thread of every rank looks once a second. After `stall_minutes` in one phase it dumps
all stacks and names the ranks that are waited for; after `end_minutes` it ends the process, so that the launcher ends
or restarts the job. A rank whose launcher is gone ends too: it would write into the folder of the run that is started
in its place.
"""

from __future__ import annotations

import datetime
import faulthandler
import os
import sys
import threading
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from d3s_megatron.actor.parallel import Layout
from d3s_megatron.config import RunConfig

EXIT_STALLED = 75  # what a stalled rank ends with: "temporary failure, try again"
LOOK_SECONDS = 1.0

# What to lower where memory ran out, by phase.
ADVICE = {
    "rollout": "rollout.max_batch_size",
    "evaluation": "rollout.max_batch_size",
    "score": "actor.max_logits_mb, then actor.max_tokens_per_microbatch",
    "update": "actor.max_tokens_per_microbatch, or set actor.recompute to full, or use more ranks "
    "(actor.tensor_model_parallel_size, actor.context_parallel_size, actor.use_distributed_optimizer)",
}
ELSEWHERE = "actor.max_tokens_per_microbatch or rollout.max_batch_size, or use more ranks"


class Watch:
    """The watchdog of one rank."""

    def __init__(self, config: RunConfig, layout: Layout) -> None:
        """Starts to watch; a phase called "start" lasts until the first `enter`."""
        self._settings, self._layout = config.watch, layout
        self._log = Path(config.train.output_dir) / "ranks" / f"rank-{layout.rank:05d}.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._store = dist.PrefixStore("watch", dist.distributed_c10d._get_default_store())
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._count = 0
        self._closed = threading.Event()
        self.enter(0, "start")
        self._thread = threading.Thread(target=self._look, name="watch", daemon=True)
        self._thread.start()

    def enter(self, step: int, phase: str) -> None:
        """This rank begins `phase` of the training step with that number, from 0."""
        self._count += 1
        self._phase, self._step, self._since = phase, step, time.monotonic()
        self._tell(waits=0)

    def report(self, failed: BaseException) -> None:
        """Writes what ended this rank to its log, with what to lower where it was memory."""
        if out_of_memory(failed):
            lower = ADVICE.get(self._phase, ELSEWHERE)
            failed.add_note(f"out of memory in phase {self._phase} of step {self._step + 1}: lower {lower}")
        self._write(
            f"ended in phase {self._phase} of step {self._step + 1}:\n" + "".join(traceback.format_exception(failed))
        )

    def close(self) -> None:
        """Stops watching."""
        self._closed.set()
        self._thread.join()

    def _look(self) -> None:
        said = -1
        while not self._closed.wait(LOOK_SECONDS):
            if self._launcher not in (None, os.getppid()):
                self._write(f"ended in {self._place()}: its launcher, process {self._launcher}, is gone")
                os._exit(EXIT_STALLED)
            seconds, count = time.monotonic() - self._since, self._count
            stall, end = self._settings.stall_minutes * 60, self._settings.end_minutes * 60
            if stall and seconds > stall / 2:
                self._tell(int(_is_waiting()))
            if stall and seconds > stall and said != count:
                said = count
                text = f"no progress for {seconds:.0f} s in {self._place()}; {self._waited_for()}"
                self._write(text, stacks=True)
                # One voice on the screen: that of the first rank, or of one that others wait for.
                if self._layout.rank in (0, *self._slowest()):
                    print(f"rank {self._layout.rank}: {text}; stacks are in {self._log}", file=sys.stderr, flush=True)
            if end and seconds > end:
                limit = self._settings.end_minutes
                text = f"ended by watch.end_minutes {limit:g}, after {seconds:.0f} s in {self._place()}"
                self._write(text, stacks=True)
                print(f"rank {self._layout.rank}: {text}", file=sys.stderr, flush=True)
                os._exit(EXIT_STALLED)

    def _place(self) -> str:
        return f"phase {self._phase} of step {self._step + 1}"

    def _tell(self, waits: int) -> None:
        try:
            self._store.set(str(self._layout.rank), f"{self._count} {waits} {self._place()}")
        except (RuntimeError, dist.DistError):
            pass  # the first rank is gone: whoever waits for it says so, and the next collective fails by itself

    def _states(self) -> dict[int, tuple[tuple[int, int], str]]:
        """rank -> ((phases entered so far, 1 where it waits for others), where it is)."""
        states = {}
        for rank in range(self._layout.world_size):
            if self._store.check([str(rank)]):
                count, waits, place = self._store.get(str(rank)).decode().split(" ", 2)
                states[rank] = (int(count), int(waits)), place
        return states

    def _slowest(self) -> list[int]:
        """Ranks that are behind all others; all of them where none is."""
        try:
            states = self._states()
        except (RuntimeError, dist.DistError):
            return []
        least = min(state for state, _ in states.values())
        return [rank for rank, (state, _) in states.items() if state == least]

    def _waited_for(self) -> str:
        try:
            states = self._states()
        except (RuntimeError, dist.DistError) as wrong:
            return f"the first rank's store does not answer ({type(wrong).__name__}), its node may be gone"
        silent = [rank for rank in range(self._layout.world_size) if rank not in states]
        if silent:
            return f"ranks {_list(silent)} have not started"
        slowest = self._slowest()
        if len(slowest) == self._layout.world_size:
            waits = states[slowest[0]][0][1]
            return "every rank waits for the others" if waits else "no rank waits for another"
        where = {states[rank][1] for rank in slowest}
        return f"waiting for rank {_list(slowest)}, in {', '.join(sorted(where))}"

    def _write(self, text: str, stacks: bool = False) -> None:
        now = datetime.datetime.now().isoformat(timespec="seconds")
        with self._log.open("a") as file:
            file.write(f"{now} rank {self._layout.rank}: {text}\n")
            file.flush()
            if stacks:
                faulthandler.dump_traceback(file, all_threads=True)


def _is_waiting() -> bool:
    """Whether the main thread is inside a call to the other ranks."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_code.co_filename.endswith("distributed_c10d.py"):
            return True
        frame = frame.f_back
    return False


def out_of_memory(failed: BaseException) -> bool:
    """Whether an exception says that memory ran out, on a GPU or on the host."""
    if isinstance(failed, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(failed, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(failed)


def _list(ranks: list[int]) -> str:
    text = ", ".join(map(str, ranks[:16]))
    return text + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
