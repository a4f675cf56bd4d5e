"""Training runs that are killed inside their second save: `killed_save_worker.py JOBS.json`.

JOBS.json   {a moment of MOMENTS: the command line of d3s_megatron.train}

Each run is a forked child with a process group of its own, which a SIGKILL ends as a whole at its moment, the writer
of the checkpoint too.
"""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

from d3s_megatron import checkpointing, train
from d3s_megatron.checkpointing import Checkpoints

SAVE = "step-000002"


def die(*_, **__) -> None:
    os.killpg(0, signal.SIGKILL)


def only_then(place, name, strikes, act=die):
    """Has `act` called in place of a function, in the calls that it `strikes`."""
    right = getattr(place, name)

    def wrapped(*args, **kwargs):
        return (act if strikes(*args) else right)(*args, **kwargs)

    setattr(place, name, wrapped)


def half_written(handle: int) -> None:
    """The last half of the file has not reached the disk."""
    os.ftruncate(handle, os.fstat(handle).st_size // 2)
    die()


def half_removed(folder: Path) -> None:
    next(path for path in folder.iterdir() if path.is_file()).unlink()
    die()


def is_data(handle: int) -> bool:
    name = os.readlink(f"/proc/self/fd/{handle}")
    return SAVE in name and name.endswith(".distcp")


MOMENTS = {
    "a file half written": lambda: only_then(os, "fsync", is_data, half_written),
    "files without megatron's mark": lambda: only_then(
        checkpointing.checkpoint.Save, "finish", lambda save: SAVE in str(save._folder)
    ),
    "files without their list": lambda: only_then(
        Checkpoints, "_write_manifest", lambda self, folder, progress: progress.step == 2
    ),
    "whole without its name": lambda: only_then(os, "rename", lambda source, target: target.name == SAVE),
    "named, but not latest": lambda: only_then(
        checkpointing, "_replace", lambda path, text: path.name == "latest" and SAVE in text
    ),
    "the older one half removed": lambda: only_then(
        shutil, "rmtree", lambda path, *_: "removal" in str(path), half_removed
    ),
}


def main(path: Path) -> None:
    for moment, argv in json.loads(path.read_text()).items():
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            MOMENTS[moment]()
            train.main(argv)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            sys.exit(f"{moment}: not reached, status {status}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
