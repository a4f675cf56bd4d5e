"""Real processes without the seconds that a start takes: ranks forked from one that has imported everything already.

Each has a process of its own, gloo between them and a world as torchrun makes it; only torchrun itself is left out, so
what is about torchrun (restarts, its messages, a rank that is killed) goes through `helpers.run_python`.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing import connection, forkserver
from pathlib import Path
from tempfile import TemporaryDirectory

import torch.distributed as dist
from helpers import HANG_SECONDS, ROOT, own_environment

# What the commands import, but for the commands themselves, which each rank runs as its own __main__.
IMPORTED = (
    *("torch", "d3s_megatron.build", "d3s_megatron.resume", "d3s_megatron.probe", "d3s_megatron.doctor.compare"),
    *("transformers.models.auto.modeling_auto", "transformers.generation.utils", "torch.utils.tensorboard"),
    *(f"transformers.models.{name}.modeling_{name}" for name in ("qwen2", "qwen3", "llama")),
)


def context() -> multiprocessing.context.BaseContext:
    """The multiprocessing context that forks from the process that has imported everything; it is started here."""
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(list(IMPORTED))
    ours = dict(os.environ)
    os.environ.update(own_environment())
    os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"  # its others begin a thread, and what forks should have one only
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(ours)
    return forks


def run_ranks(args: Sequence[object], num_processes: int = 1) -> subprocess.CompletedProcess[str]:
    """`python ARGS` in that many ranks of one world; output as text, one rank after the other."""
    argv = list(map(str, args))
    with TemporaryDirectory() as folder:
        files = [Path(folder, f"{rank}.{kind}") for rank in range(num_processes) for kind in ("out", "err")]
        env = own_environment()
        if num_processes > 1:  # the store is ours, as it is torchrun's there: no port is free first and taken later
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(hours=1))
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
            env |= {"WORLD_SIZE": str(num_processes), "LOCAL_WORLD_SIZE": str(num_processes)}
        ranks = []
        for rank in range(num_processes):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if num_processes > 1 else {}
            ranks.append(context().Process(target=_rank, args=(argv, env | place, *files[2 * rank :][:2])))
            ranks[-1].start()
        code = _wait(ranks)
        out, err = ("".join(file.read_text() for file in files[kind::2] if file.exists()) for kind in (0, 1))
    return subprocess.CompletedProcess(argv, code, out, err)


def _wait(ranks: list) -> int:
    """0 where all ended well, else the first status that is not; ends the others then, as torchrun does."""
    end, code = time.monotonic() + HANG_SECONDS, 0
    try:
        while code == 0 and any(process.is_alive() for process in ranks):
            connection.wait([process.sentinel for process in ranks if process.is_alive()], timeout=10)
            code = next((process.exitcode for process in ranks if process.exitcode), 0)
            assert time.monotonic() < end, "the ranks hang"
    finally:
        for process in ranks:
            if process.is_alive():
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.join()
    return code or next((process.exitcode for process in ranks if process.exitcode), 0)


def _rank(argv: list[str], env: dict[str, str], out: Path, err: Path) -> None:
    """The life of a forked rank: `python ARGV` with this environment."""
    os.setpgid(0, 0)
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(ROOT)
    for signum in (signal.SIGINT, signal.SIGTERM):  # the process that was forked from ignores them
        signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
    if argv[0] == "-m":
        sys.argv, sys.path[:0] = argv[1:], [str(ROOT)]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = argv
        sys.path.insert(0, str(Path(argv[0]).resolve().parent))
        runpy.run_path(argv[0], run_name="__main__")
