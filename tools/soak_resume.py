"""Kills a training run again and again, and compares what comes out with a run that was left alone.

    python tools/soak_resume.py --out runs/soak --processes 2 --minutes 8 -- \\
        examples/arithmetic/d3s.yaml --model.path runs/quickstart/warm_start \\
        --data.train_path runs/quickstart/data/train.jsonl --checkpoint.every 5

Both runs get the arguments after `--`. A kill (SIGKILL to the launcher and all its ranks) comes after a random, seeded
number of further training steps, whatever is under way then. With --minutes it stops by itself, by one more kill, and
the same command goes on from there (exit code 3). Exit code 0 where weights and log rows, times apart, are equal bit
for bit.
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
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import load_file

UNFINISHED = 3


def steps_in(log: Path) -> int:
    """Training steps that the log holds."""
    return log.read_text().count('"progress"') if log.exists() else 0


def start(argv: Sequence[str], out: Path, processes: int) -> subprocess.Popen:
    """The command, with its output added to a file beside the run's folder."""
    command = [sys.executable, "-m"]
    if processes > 1:
        command += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
    command += ["d3s_megatron.train", *argv, "--train.output_dir", str(out)]
    with out.with_suffix(".txt").open("a") as said:
        return subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)


def family_of(pid: int) -> list[int]:
    """A process and all that descend from it: ranks have process groups of their own, so one group is not enough."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has ended meanwhile
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def kill(process: subprocess.Popen) -> None:
    """SIGKILL to the launcher and everything below it; returns when they are gone."""
    doomed = family_of(process.pid)
    for pid in doomed:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()
    while any(Path(f"/proc/{pid}").exists() and _is_alive(pid) for pid in doomed[1:]):
        time.sleep(0.02)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def soak(argv: Sequence[str], out: Path, processes: int, between: tuple[int, int], seed: int, until: float) -> bool:
    """Runs on through kills, each noted in OUT.kills.json; whether the run has ended."""
    notes = out.with_suffix(".kills.json")
    kills = json.loads(notes.read_text()) if notes.exists() else []
    while not (out / "summary.json").exists():
        log = out / "log.jsonl"
        aim = steps_in(log) + random.Random(f"{seed} {len(kills)}").randint(*between)
        process = start(argv, out, processes)
        while process.poll() is None and steps_in(log) < aim and time.monotonic() < until:
            time.sleep(0.02)
        if process.poll() is None and not (out / "export").exists():
            kill(process)
            kills.append(steps_in(log))
            notes.write_text(json.dumps(kills))
            print(f"killed after {kills[-1]} steps", flush=True)
            if time.monotonic() >= until:
                return False
        elif process.wait():
            sys.exit(f"the run failed with {process.returncode}, see {out.with_suffix('.txt')}")
    return True


def rows(out: Path) -> list[dict]:
    """The log without times."""
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith("time/")} for row in lines]


def compare(left_alone: Path, killed: Path) -> bool:
    """Says what differs between the two runs; whether nothing does."""
    one, two = (load_file(out / "export" / "model.safetensors") for out in (left_alone, killed))
    differing = [name for name in one if not one[name].equal(two[name])]
    here, there = rows(left_alone), rows(killed)
    unlike = {key for a, b in zip(here, there, strict=False) for key in a.keys() | b.keys() if a.get(key) != b.get(key)}
    kills = json.loads(killed.with_suffix(".kills.json").read_text())
    resumed = killed.with_suffix(".txt").read_text().count("resumed from")
    print(f"{steps_in(killed / 'log.jsonl')} steps; killed {len(kills)} times, after steps {kills}")
    print(f"resumed from a checkpoint {resumed} times")
    print(f"weights that differ: {', '.join(differing) or 'none'} of {len(one)}")
    print(
        f"log rows: {len(here)} and {len(there)}; what differs in them, times apart: {', '.join(unlike) or 'nothing'}"
    )
    return not differing and here == there


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for both runs")
    parser.add_argument("--kill-every", type=int, nargs=2, default=(20, 40), metavar=("LOW", "HIGH"), help="steps")
    parser.add_argument("--processes", type=int, default=1, help="ranks, by torchrun where more than one")
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so long, to go on later")
    parser.add_argument("arguments", nargs="+", help="of d3s_megatron.train, after --")
    args = parser.parse_args()
    until = time.monotonic() + 60 * args.minutes
    left_alone, killed = args.out / "left-alone", args.out / "killed"
    args.out.mkdir(parents=True, exist_ok=True)
    if not (left_alone / "summary.json").exists():
        process = start([*args.arguments, "--train.overwrite", "true"], left_alone, args.processes)
        if process.wait():
            sys.exit(f"the undisturbed run failed, see {left_alone.with_suffix('.txt')}")
    if time.monotonic() >= until or not soak(
        args.arguments, killed, args.processes, tuple(args.kill_every), args.seed, until
    ):
        print(f"time is up after {steps_in(killed / 'log.jsonl')} steps; the same command goes on")
        sys.exit(UNFINISHED)
    sys.exit(not compare(left_alone, killed))


if __name__ == "__main__":
    main()
