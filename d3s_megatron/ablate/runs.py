"""The runs of a comparison: ordinary runs of d3s_megatron.train, one folder each, finished ones kept.

    OUT/comparison.yaml          the settings they share, so that a later call cannot mix others in
    OUT/starts/seed-0/           what SCRIPT wrote for the seed: every algorithm starts from it
    OUT/ALGORITHM/seed-0/        one run; output.txt is what it printed

A run is complete once it has a summary.json. One that was stopped goes on from its newest checkpoint, and starts again
where it has none.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from d3s_megatron.launch import own_environment
from d3s_megatron.report.log_file import LOG_FILE, SUMMARY_FILE

START_FILE = "start.yaml"
SETTINGS_FILE = "comparison.yaml"
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Comparison:
    """What to run."""

    out: Path
    config: Path  # YAML of d3s_megatron.train
    algorithms: tuple[str, ...]
    seeds: tuple[int, ...]
    overrides: tuple[str, ...] = ()  # --section.key value, for every run
    start: Path | None = None  # script called with --seed and --out; None starts every seed from the configuration
    num_processes: int = 1  # ranks of each run

    def runs(self) -> list[Run]:
        """All of them, every algorithm of a seed before the next seed, so that a cut leaves a balanced table."""
        return [Run(self, algorithm, seed) for seed in self.seeds for algorithm in self.algorithms]

    def start_folder(self, seed: int) -> Path:
        """Where a seed's start lies."""
        return self.out / "starts" / f"seed-{seed}"

    def settings(self) -> dict[str, Any]:
        """What must be the same for all runs of one folder."""
        return {
            "config": yaml.safe_load(self.config.read_text()) or {},
            "overrides": list(self.overrides),
            "start": self.start.read_text() if self.start else None,
            "num_processes": self.num_processes,
        }

    def check_folder(self) -> None:
        """Writes the settings down, or compares them with those there; ValueError where they are others."""
        path = self.out / SETTINGS_FILE
        now = self.settings()
        if not path.exists():
            self.out.mkdir(parents=True, exist_ok=True)
            path.write_text(yaml.safe_dump(now, sort_keys=False))
            return
        before = yaml.safe_load(path.read_text())
        other = [name for name in now if before.get(name) != now[name]]
        if other:
            raise ValueError(
                f"--out {self.out} holds runs with another {', '.join(other)} (see {path}): give another folder, or "
                "the settings it was begun with"
            )


@dataclass(frozen=True)
class Run:
    """One algorithm with one seed."""

    comparison: Comparison
    algorithm: str
    seed: int

    @property
    def folder(self) -> Path:
        return self.comparison.out / self.algorithm / f"seed-{self.seed}"

    @property
    def is_done(self) -> bool:
        return (self.folder / SUMMARY_FILE).exists()

    def arguments(self) -> list[str]:
        """Those of d3s_megatron.train; later ones win."""
        whole = self.comparison
        arguments = [str(whole.config)]
        if whole.start:
            arguments += ["--config", str(whole.start_folder(self.seed) / START_FILE)]
        arguments += whole.overrides
        own = {"algorithm.name": self.algorithm, "train.seed": self.seed, "train.output_dir": self.folder}
        arguments += [part for key, value in own.items() for part in (f"--{key}", str(value))]
        if (self.folder / LOG_FILE).exists() and not any((self.folder / "checkpoints").glob("step-*")):
            arguments += ["--train.overwrite", "true"]  # cut short before its first checkpoint
        return arguments

    def command(self) -> list[str]:
        """The command line of the run."""
        launcher = [sys.executable]
        if self.comparison.num_processes > 1:
            launcher += ["-m", "torch.distributed.run", "--standalone"]
            launcher += ["--nproc-per-node", str(self.comparison.num_processes)]
        return [*launcher, "-m", "d3s_megatron.train", *self.arguments()]


def prepare_start(comparison: Comparison, seed: int) -> None:
    """Calls the start script for a seed, unless its start is there; CalledProcessError where it fails."""
    folder = comparison.start_folder(seed)
    if comparison.start is None or (folder / START_FILE).exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(comparison.start), "--seed", str(seed), "--out", str(folder)]
    with (folder / "output.txt").open("w") as output:
        subprocess.run(command, check=True, stdout=output, stderr=subprocess.STDOUT, env=own_environment())
    if not (folder / START_FILE).exists():
        raise ValueError(f"{comparison.start} wrote no {START_FILE} to {folder}: a YAML file for d3s_megatron.train")


@dataclass
class Outcome:
    """What became of the runs."""

    num_kept: int = 0
    num_done: int = 0
    failed: list[Run] = field(default_factory=list)
    stopped: bool = False


class Stopper:
    """Notes SIGTERM and SIGINT while the runs go on; they then save, end, and go on at the next call."""

    def __init__(self) -> None:
        self.wanted = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stopper:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: Any) -> None:
        self.wanted = True

    def __exit__(self, *failed: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def run_all(comparison: Comparison, num_jobs: int, say: Callable[[str], None] = print) -> Outcome:
    """Runs what is not complete, up to `num_jobs` at once; a failed run is said and leaves the others alone."""
    runs = comparison.runs()
    waiting = [run for run in runs if not run.is_done]
    outcome = Outcome(num_kept=len(runs) - len(waiting))
    if outcome.num_kept:
        say(f"{outcome.num_kept} of {len(runs)} runs are complete already")
    active: dict[subprocess.Popen, tuple[Run, float]] = {}
    with Stopper() as stopper:
        while active or (waiting and not stopper.wanted):
            while waiting and len(active) < num_jobs and not stopper.wanted:
                run = waiting.pop(0)
                active[_begin(run)] = (run, time.monotonic())
            if stopper.wanted and not outcome.stopped:
                outcome.stopped = True
                for process in active:
                    process.terminate()
            for process in [p for p in active if p.poll() is not None]:
                run, began = active.pop(process)
                _end(run, process.returncode, time.monotonic() - began, outcome, len(runs), say)
            time.sleep(POLL_SECONDS)
    return outcome


def _begin(run: Run) -> subprocess.Popen:
    run.folder.mkdir(parents=True, exist_ok=True)
    with (run.folder / "output.txt").open("a") as output:
        # A session of its own: Ctrl-C reaches the run through us alone, once, and it saves.
        return subprocess.Popen(
            run.command(), stdout=output, stderr=subprocess.STDOUT, env=own_environment(), start_new_session=True
        )


def _end(run: Run, code: int, seconds: float, outcome: Outcome, num_runs: int, say: Callable[[str], None]) -> None:
    name = f"{run.algorithm}, seed {run.seed}"
    if run.is_done:
        outcome.num_done += 1
        say(f"{outcome.num_kept + outcome.num_done:>4}/{num_runs}  {name}: {seconds:.0f} s")
    elif outcome.stopped:
        say(f"           {name}: stopped after {seconds:.0f} s")
    else:
        outcome.failed.append(run)
        last = (run.folder / "output.txt").read_text(errors="replace").strip().splitlines()[-1:]
        say(f"           {name}: failed with exit code {code}: {' '.join(last)} (see {run.folder / 'output.txt'})")


def parse_names(text: str) -> tuple[str, ...]:
    """`a,b,c` -> names; ValueError where one comes twice or there is none."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names or len(set(names)) < len(names):
        raise ValueError(f"--algorithms is {text!r}: give names joined by commas, each once")
    return names


def find_runs(out: Path) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """(algorithms, seeds) of the runs that have a log below `out`."""
    logs: Sequence[Path] = sorted(out.glob("*/seed-*/log.jsonl"))
    algorithms = tuple(dict.fromkeys(path.parent.parent.name for path in logs))
    seeds = sorted({int(path.parent.name.removeprefix("seed-")) for path in logs})
    return algorithms, tuple(seeds)
