"""The small process that raises workers: it loads the judge once, then forks a warm worker in milliseconds.

Why a process of its own: the trainer has threads, torch and perhaps CUDA, and must not be forked; a fresh interpreter
for every killed worker would pay the imports again. The nursery has one thread, imports no torch, and is the only
parent of the workers, so it alone kills and reaps them: no zombie, no recycled process id.

No orphans: the nursery ends when its control socket closes or its parent is gone, and kills its workers; a worker ends
when its socket closes, and the kernel kills it when the nursery dies first.

Control messages (nursery side): first a length and JSON settings, answered by a length and JSON {"error": str | null};
then b"s" with one socket passed along (fork a worker on it; answered by its process id), or b"k" and a process id
(kill it; no answer, and it is reaped later, for on a loaded machine dying takes time). Integers are 8 bytes, little
endian.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any

Judge = Callable[[str, str], Any]

_INT = struct.Struct("<q")
_PARENT_CHECK_SECONDS = 1.0  # how soon a killed trainer is noticed when some other process still holds its sockets
_REAP_SECONDS = 0.02  # how often those who were killed are looked at until they are gone
_PR_SET_PDEATHSIG = 1  # from linux/prctl.h
_WORKER_OOM_SCORE = 900  # of 1000: when memory runs out the kernel takes a worker, not the trainer


def send_message(sock: socket.socket, message: Any) -> None:
    """Write one JSON message, its length first."""
    body = json.dumps(message).encode()
    sock.sendall(_INT.pack(len(body)) + body)


def receive_message(sock: socket.socket) -> Any:
    """Read one JSON message; EOFError where the other side is gone."""
    (length,) = _INT.unpack(_receive(sock, _INT.size))
    return json.loads(_receive(sock, length))


def send_int(sock: socket.socket, number: int) -> None:
    """Write one integer."""
    sock.sendall(_INT.pack(number))


def receive_int(sock: socket.socket) -> int:
    """Read one integer; EOFError where the other side is gone."""
    return int(_INT.unpack(_receive(sock, _INT.size))[0])


def _receive(sock: socket.socket, num_bytes: int) -> bytes:
    chunks = []
    while num_bytes:
        chunk = sock.recv(min(num_bytes, 1 << 20))
        if not chunk:
            raise EOFError("the other side closed the socket")
        chunks.append(chunk)
        num_bytes -= len(chunk)
    return b"".join(chunks)


def load_judge(path: str) -> Judge:
    """The function named by `module:function`; its module's `warm_up()` is called where there is one."""
    module_name, _, function_name = path.partition(":")
    module = importlib.import_module(module_name)
    judge: Judge = getattr(module, function_name)
    if not callable(judge):
        raise TypeError(f"{path} is not a function")
    warm_up = getattr(module, "warm_up", None)
    if callable(warm_up):
        warm_up()
    return judge


def main(control_fd: int, parent_pid: int) -> None:
    """Serve one pool until its control socket closes or its process is gone."""
    control = socket.socket(fileno=control_fd)
    settings = receive_message(control)
    try:
        judge = load_judge(settings["judge"])
    except Exception as error:  # a user's module may raise anything; the pool turns this into a ValueError
        send_message(control, {"error": f"{type(error).__name__}: {error}"})
        return
    send_message(control, {"error": None})

    waiting = select.poll()  # select.select refuses descriptors from 1,024 on, which a large trainer may hand down
    waiting.register(control, select.POLLIN)
    workers: set[int] = set()
    dying: set[int] = set()
    try:
        while os.getppid() == parent_pid:
            dying = {pid for pid in dying if os.waitpid(pid, os.WNOHANG) == (0, 0)}
            if not waiting.poll(1000 * (_REAP_SECONDS if dying else _PARENT_CHECK_SECONDS)):
                continue
            command, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if command == b"s":
                pid = os.fork()
                if pid == 0:
                    control.close()
                    _work(socket.socket(fileno=descriptors[0]), judge, settings)
                os.close(descriptors[0])
                workers.add(pid)
                send_int(control, pid)
            elif command == b"k":
                pid = receive_int(control)
                if pid in workers:  # nothing but our own children is ever killed
                    os.kill(pid, signal.SIGKILL)  # safe for a dead child too: it keeps its id until it is reaped
                    workers.discard(pid)
                    dying.add(pid)
            else:
                break
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the pool is gone: that is how a nursery ends
    finally:
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        for pid in workers | dying:
            os.waitpid(pid, 0)


def _work(sock: socket.socket, judge: Judge, settings: dict[str, Any]) -> None:
    """A worker's life: judge what arrives until the socket closes; never returns."""
    exit_code = 1
    try:
        _die_with_parent()
        if settings["memory_limit_mb"]:
            limit = settings["memory_limit_mb"] << 20
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        while True:
            for text, gold in receive_message(sock):  # read whole before judging, so that the pool never blocks
                send_message(sock, _answer(judge, text, gold))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        exit_code = 0
    finally:
        os._exit(exit_code)  # no clean-up of what belongs to the nursery


def _answer(judge: Judge, text: str, gold: str) -> list[Any]:
    """[value or null, status, message] for one answer; whatever the judge raised is a crash with its reason."""
    try:
        result = judge(text, gold)
        value, status = result if isinstance(result, tuple) else (result, None)
        value = float(value)
    except Exception as error:
        return [None, "crash", f"{type(error).__name__}: {error}"[:500]]
    if value != value:
        return [None, "crash", "the reward function returned NaN"]
    return [value, status or ("right" if value > 0 else "wrong"), None]


def _die_with_parent() -> None:
    if sys.platform != "linux":
        return  # elsewhere the closing socket has to do
    import ctypes

    # Bound to the thread that forked: the nursery has one, so this means the nursery itself.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write(str(_WORKER_OOM_SCORE))
    except OSError:
        pass  # some containers forbid it; the memory limit still holds
