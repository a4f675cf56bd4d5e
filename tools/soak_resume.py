"""Kills a training run again and again, and compares what comes out with a run that was left alone.

    python tools/soak_resume.py --out runs/soak --kill-every 20 40 -- CONFIG.yaml --model.path ... --checkpoint.every 5

Both runs get the arguments after `--`. The kills (SIGKILL to the whole process group) come after a random, seeded
number of further log rows; a checkpoint may be under way. Exit code 0 where weights and log rows, times apart, are
equal bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from safetensors.torch import load_file


def steps_in(log: Path) -> int:
    """Training steps that the log holds."""
    return log.read_text().count('"progress"') if log.exists() else 0


def start(argv: list[str], out: Path, processes: int) -> subprocess.Popen:
    """The command in a process group of its own."""
    command = [sys.executable, "-m"]
    if processes > 1:
        command += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
    command += ["d3s_megatron.train", *argv, "--train.output_dir", str(out)]
    return subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)


def soak(argv: list[str], out: Path, processes: int, low: int, high: int, rng: random.Random) -> int:
    """Runs to the end through kills; returns how many there were."""
    kills = 0
    while True:
        process, aim = start(argv, out, processes), steps_in(out / "log.jsonl") + rng.randint(low, high)
        while process.poll() is None and steps_in(out / "log.jsonl") < aim:
            time.sleep(0.02)
        if process.poll() is None and not (out / "export").exists():
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            kills += 1
            continue
        if process.wait():
            sys.exit(f"the run failed with {process.returncode}")
        return kills


def rows(out: Path) -> list[dict]:
    """The log without times."""
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith("time/")} for row in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kill-every", type=int, nargs=2, default=(20, 40), metavar=("LOW", "HIGH"))
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("arguments", nargs="+")
    args = parser.parse_args()
    left_alone, killed = args.out / "left-alone", args.out / "killed"
    if start(args.arguments, left_alone, args.processes).wait():
        sys.exit("the undisturbed run failed")
    kills = soak(args.arguments, killed, args.processes, *args.kill_every, random.Random(args.seed))
    one, two = (load_file(out / "export" / "model.safetensors") for out in (left_alone, killed))
    differing = [name for name in one if not one[name].equal(two[name])]
    same = rows(left_alone) == rows(killed)
    print(
        f"{steps_in(killed / 'log.jsonl')} steps, {kills} kills; weights that differ: {differing or 'none'}; log {same}"
    )
    sys.exit(bool(differing) or not same)


if __name__ == "__main__":
    main()
