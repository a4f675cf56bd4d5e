"""Run a conversion: a folder beside the target, files of their final size, workers, a journal, and a rename last.

A killed run leaves the folder `.NAME.partial` with a journal of what is surely on disk; the same command continues
there. Nothing under the target's own name is ever incomplete, and the source is only read.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import torch

from d3s_megatron.convert.checkpoint.disk import Reader, Writer, reserve
from d3s_megatron.convert.checkpoint.memory import AnonymousPeak
from d3s_megatron.convert.checkpoint.moves import Task, run_task
from d3s_megatron.convert.checkpoint.sizes import size_text

JOURNAL = "journal"
SYNC_BYTES = 512 * 2**20  # written by a worker between two entries of the journal: what a killed run may repeat


@dataclass(frozen=True)
class Job:
    """A conversion, planned to the byte; target files in `tasks` are relative to the folder being written."""

    out: Path
    sizes: dict[str, int]  # bytes of every large file
    frames: list[tuple[str, int, bytes]]  # (file, offset, bytes): headers and whatever else is no tensor data
    tasks: list[Task]
    finish: Callable[[Path], None]  # writes the small files
    sources: list[Path] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of the large files."""
        return sum(self.sizes.values())


@dataclass(frozen=True)
class Report:
    """What a finished run took."""

    nbytes: int
    continued_nbytes: int  # of these, written by an earlier run that was stopped
    seconds: float
    peak_anonymous: int  # bytes, of the whole process
    added_anonymous: int  # bytes, above what the process held when the run began

    def __str__(self) -> str:
        moved = self.nbytes - self.continued_nbytes
        before = f" ({size_text(self.continued_nbytes)} were there from a stopped run)" if self.continued_nbytes else ""
        return (
            f"wrote {size_text(moved)} in {self.seconds:.2f} s, {moved / 1e9 / self.seconds:.2f} GB/s, synced to disk"
            f"{before}; peak anonymous memory {self.peak_anonymous / 1e6:.0f} MB, "
            f"{self.added_anonymous / 1e6:.0f} MB of it for the conversion"
        )


def partial_folder(out: Path) -> Path:
    """Where a conversion lies until it is whole: beside its target, on the same disk."""
    return out.with_name(f".{out.name}.partial")


def run(job: Job, workers: int = 1, direct: bool = True, progress: Callable[[int, int], None] | None = None) -> Report:
    """Write `job.out`; ValueError where it exists, another run is writing it, or the disk is full.

    `direct` False moves all bytes through the page cache, as cp does. `progress` is told, now and then and by one
    thread at a time, how many bytes of how many are written.
    """
    if workers < 1:
        raise ValueError(f"workers is {workers}: expected 1 or more")
    if job.out.exists():
        raise ValueError(f"{job.out} exists: remove it or choose another folder")
    for folder in {path.parent.resolve() for path in job.sources}:
        if folder in job.out.resolve().parents:
            raise ValueError(f"{job.out} lies inside {folder}, which is read and stays as it is: choose another folder")
    torch.set_num_threads(1)  # the workers are the parallelism
    started = time.perf_counter()
    partial = partial_folder(job.out)
    before = _fingerprint(job)
    with AnonymousPeak() as memory:
        partial.mkdir(parents=True, exist_ok=True)
        with _Journal(partial, before) as journal:
            _presize(job, partial, journal)
            left = [(i, task) for i, task in enumerate(job.tasks) if i not in journal.done]
            continued, total = sum(job.tasks[i].nbytes for i in journal.done), sum(t.nbytes for t in job.tasks)
            _work(left, partial, workers, journal, direct, lambda done: progress and progress(continued + done, total))
            job.finish(partial)
            if _fingerprint(job) != before:
                raise ValueError("a source file changed while it was converted: run again on files at rest")
            (partial / JOURNAL).unlink()
        _sync(partial)
        os.rename(partial, job.out)
        _sync_folder(job.out.parent)
    return Report(job.nbytes, continued, time.perf_counter() - started, memory.peak, memory.added)


class _Journal:
    """Numbers of the tasks whose bytes are on disk; a file lock keeps a second run out."""

    def __init__(self, partial: Path, fingerprint: str) -> None:
        self.path, self.fingerprint = partial / JOURNAL, fingerprint
        self.done: set[int] = set()
        self.lock = threading.Lock()

    def __enter__(self) -> _Journal:
        self.file = open(self.path, "a+")
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.file.close()
            raise ValueError(f"another run is writing {self.path.parent}: wait for it") from error
        self.file.seek(0)
        lines = self.file.read().splitlines()
        if lines and lines[0] == self.fingerprint:
            self.done = {int(number) for line in lines[1:] for number in line.split() if line.endswith(" ")}
        elif lines or len(list(self.path.parent.iterdir())) > 1:
            self.file.close()
            raise ValueError(
                f"{self.path.parent} was left by a run with another source or other options: remove it, or repeat "
                "that run"
            )
        else:
            self.append(self.fingerprint + "\n")
        return self

    def __exit__(self, *args: object) -> None:
        self.file.close()

    def append(self, text: str) -> None:
        with self.lock:
            self.file.write(text)
            self.file.flush()
            os.fsync(self.file.fileno())

    def add(self, numbers: Iterable[int]) -> None:
        # The blank at the end marks a line that was written whole.
        self.append(" ".join(map(str, numbers)) + " \n")


def _fingerprint(job: Job) -> str:
    digest = hashlib.sha256()
    for path in sorted(set(job.sources)):
        stat = path.stat()
        digest.update(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    for name, size in sorted(job.sizes.items()):
        digest.update(f"{name} {size}\n".encode())
    digest.update(str(len(job.tasks)).encode())
    return digest.hexdigest()


def _presize(job: Job, partial: Path, journal: _Journal) -> None:
    """Reserve every file's space, so that a full disk shows before the work, not after it."""
    fresh = not journal.done
    try:
        for name, size in job.sizes.items():
            descriptor = os.open(partial / name, os.O_CREAT | os.O_WRONLY, 0o644)
            try:
                if fresh:
                    os.ftruncate(descriptor, 0)  # padding relies on zeros
                reserve(descriptor, size)
            finally:
                os.close(descriptor)
        _frames(job, partial)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        if fresh:
            shutil.rmtree(partial)
        raise _disk_full(job.nbytes, partial) from error


def _frames(job: Job, partial: Path) -> None:
    """Write what is no tensor data; a continued run does it again, as no journal says that it reached the disk."""
    by_file: dict[str, list[tuple[int, bytes]]] = {}
    for name, offset, data in job.frames:
        by_file.setdefault(name, []).append((offset, data))
    for name, parts in by_file.items():
        descriptor = os.open(partial / name, os.O_WRONLY)
        try:
            for offset, data in parts:
                os.pwrite(descriptor, data, offset)
        finally:
            os.close(descriptor)


def _disk_full(nbytes: int, partial: Path) -> ValueError:
    free = shutil.disk_usage(partial.parent).free
    return ValueError(
        f"the disk is full: {size_text(nbytes)} are needed beside {partial.parent}, {size_text(free)} are free; "
        "make room and run the same command again"
    )


def _work(
    tasks: list[tuple[int, Task]],
    partial: Path,
    workers: int,
    journal: _Journal,
    direct: bool,
    written: Callable[[int], object],
) -> None:
    queue, lock = iter(tasks), threading.Lock()
    failed = threading.Event()
    total = 0

    def worker() -> None:
        nonlocal total
        with closing(Reader(direct)) as reader, closing(Writer(partial, direct)) as writer:
            done: list[int] = []
            pending = 0
            while not failed.is_set():
                with lock:
                    number, task = next(queue, (-1, None))
                if task is None:
                    break
                try:
                    run_task(task, reader, writer)
                except BaseException:
                    failed.set()
                    raise
                done.append(number)
                pending += task.nbytes
                with lock:
                    total += task.nbytes
                    written(total)
                if pending >= SYNC_BYTES:
                    writer.sync()
                    journal.add(done)
                    done, pending = [], 0
            writer.sync()
            if done:
                journal.add(done)

    with ThreadPoolExecutor(workers) as pool:
        for future in [pool.submit(worker) for _ in range(workers)]:
            try:
                future.result()
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise _disk_full(sum(task.nbytes for _, task in tasks), partial) from error
                raise


def _sync(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
