"""Runs one update per layout and compares each with a single process, and that one with transformers."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from d3s_megatron.actor.config import ActorConfig
from d3s_megatron.actor.model import check_shape, check_transformer_engine
from d3s_megatron.convert import read_shape
from d3s_megatron.doctor.compare import STAGES, beyond, compare, likely_cause, worst_by_stage
from d3s_megatron.doctor.layouts import NamedLayout, parse_layout
from d3s_megatron.doctor.plain import plain_update
from d3s_megatron.doctor.tiny import tiny_model
from d3s_megatron.doctor.update import Job, write_jobs
from d3s_megatron.launch import own_environment

SINGLE = "single"  # what every layout is compared with; it packs all it has into one row
SMALL_ROWS = {"max_tokens_per_microbatch": 48}  # layouts have several, so that pipelines fill and sums are split
EXACT = ("kept ids", "kept tokens")


def launch(arguments: Sequence[str], num_processes: int) -> subprocess.CompletedProcess[str]:
    """`torchrun --nproc-per-node NUM ARGUMENTS` on a free port of this machine; output as text."""
    command = [sys.executable]
    if num_processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
    return subprocess.run([*command, *arguments], env=own_environment(), capture_output=True, text=True, check=False)


def run_jobs(
    jobs: Mapping[str, tuple[int, Job]],
    folder: Path,
    launch: Callable[[Sequence[str], int], subprocess.CompletedProcess[str]] = launch,
) -> dict[str, dict[str, Any]]:
    """Outcomes of named jobs, each with its number of processes; jobs of one size share their processes."""
    for num_processes in sorted({size for size, _ in jobs.values()}):
        named = {name: job for name, (size, job) in jobs.items() if size == num_processes}
        file = write_jobs(list(named.values()), folder / f"jobs{num_processes}.json")
        done = launch(["-m", "d3s_megatron.doctor.update", str(file)], num_processes)
        if done.returncode:
            raise RuntimeError(f"the update failed in one of {', '.join(named)}\n{done.stderr[-4000:]}")
    return {name: torch.load(job.out) for name, (_, job) in jobs.items()}


def check(model: str, layouts: Sequence[NamedLayout]) -> None:
    """ValueError where the machine or the model cannot hold a layout; starts nothing."""
    shape = read_shape(model)
    for layout in layouts:
        check_shape(shape, ActorConfig(**layout.actor))
        check_transformer_engine(ActorConfig(**layout.actor))
        if torch.cuda.is_available() and layout.num_processes > torch.cuda.device_count():
            raise ValueError(
                f"layout {layout.name} takes {layout.num_processes} GPUs, this machine has "
                f"{torch.cuda.device_count()}: leave it out, or hide them all with CUDA_VISIBLE_DEVICES= to use CPUs"
            )


def parity(
    model: str,
    names: Sequence[str],
    tolerance: float,
    with_plain: bool = True,
    fault: str | None = None,
    actor: Mapping[str, Any] | None = None,
) -> bool:
    """Prints a line per layout; True where all agree. See `__main__` for the arguments."""
    layouts = [parse_layout(name) for name in names]
    layouts = [replace(layout, actor={**SMALL_ROWS, **(actor or {}), **layout.actor}) for layout in layouts]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if model == "tiny":
            model = str(tiny_model(folder / "model"))
        check(model, layouts)
        jobs = {
            layout.name: (
                layout.num_processes,
                Job(model, str(folder / f"{layout.name}.pt"), layout.actor, fault=fault),
            )
            for layout in [NamedLayout(SINGLE, 1, {}), *layouts]
        }
        outcomes = run_jobs(jobs, folder)
        single = outcomes.pop(SINGLE)
        pairs = [(name, outcome, single, f"{SINGLE} process") for name, outcome in outcomes.items()]
        if with_plain:
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            pairs.insert(0, (SINGLE, single, plain_update(model, single, device), "transformers"))
    return report(pairs, tolerance)


def report(pairs: Sequence[tuple[str, dict, dict, str]], tolerance: float) -> bool:
    """Prints (layout, its outcome, the wanted one, whose that is), a line each; True where all agree."""
    print("largest relative error (log-probs and entropy: nats; kept: number that differ)")
    print(f"{'layout':<10} {'against':<15} " + " ".join(f"{stage:>11}" for stage in STAGES))
    agree = True
    for name, got, want, against in pairs:
        differences = compare(got, want)
        worst = worst_by_stage(differences)
        cells = [f"{worst[s].error:.0f}" if s in EXACT else f"{worst[s].error:.1e}" for s in STAGES]
        wrong = beyond(differences, tolerance)
        print(f"{name:<10} {against:<15} " + " ".join(f"{cell:>11}" for cell in cells) + ("  WRONG" if wrong else ""))
        if wrong:
            agree = False
            print(f"  first that differs: {wrong[0].name}, by {wrong[0].error:.2g}; {len(wrong)} in all differ")
            print(f"  likely cause: {likely_cause(wrong)}")
    return agree
