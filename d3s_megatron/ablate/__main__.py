"""python -m d3s_megatron.ablate --config CONFIG.yaml --algorithms grpo,d3s --seeds 5 --out DIR [--section.key VALUE]

Trains every algorithm with every seed, all on the same data, starts and rollout budget, and compares them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from d3s_megatron.ablate.curves import draw
from d3s_megatron.ablate.results import AXES, Axis, RunCurve, places, read_all
from d3s_megatron.ablate.runs import Comparison, find_runs, parse_names, prepare_start, run_all
from d3s_megatron.ablate.tables import compare, write_csv, write_curves

ALGORITHMS = "grpo,pods,d1s,d1s-c,d2s,d3s,d3s-i,gspo,gspo+d3s,random,entropy_8020"
OURS = ("--algorithm.name", "--train.seed", "--train.output_dir", "--train.overwrite")
STOPPED = 3  # exit code of a call that was asked to end before all runs were complete

EPILOG = """\
Every run is an ordinary one of d3s_megatron.train in DIR/ALGORITHM/seed-N; the same command goes on where it was
stopped, finished runs are kept, and SIGTERM or Ctrl-C lets the current ones save first. Runs take seed 0 of all
algorithms, then seed 1, and so on. --section.key VALUE goes to every run, e.g. --train.steps 50.

What a seed starts from: with a start.py beside CONFIG (or --start SCRIPT), the script is called once a seed with
`--seed N --out FOLDER` and writes FOLDER/start.yaml, which names model and data; without one, all seeds start from
the model and data of CONFIG and differ in prompt order and sampling.

Tables: mean over seeds, and half the width of its 95% interval (Student's t over seeds). Accuracy at a count of
tokens or seconds is on the straight line between two evaluations (train.eval_every); "-" is where a run did not
get that far. The first algorithm is the one that the others are compared with, seed by seed.
"""


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m d3s_megatron.ablate",
        description="Compare algorithms on the same data, starts and rollout budget, over several seeds.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", type=Path, help="YAML file of d3s_megatron.train")
    add("--algorithms", help=f"names joined by commas (default {ALGORITHMS})")
    add("--seeds", type=int, default=5, help="seeds 0 to N-1 (default 5)")
    add("--out", type=Path, required=True, metavar="DIR", help="folder of runs, tables and pictures")
    add("--start", type=Path, metavar="SCRIPT", help="see below (default start.py beside CONFIG, where there is one)")
    add("--jobs", type=int, default=1, help="runs at once (default 1)")
    add("--processes", type=int, default=1, metavar="N", help="ranks of each run, by torchrun (default 1)")
    add(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="seconds of a step: wall, or the first rank's processor",
    )
    add("--at-steps", metavar="LIST", help="compare after these steps, e.g. 40,160 (default: quarters of the runs)")
    add("--at-tokens", metavar="LIST", help="compare at these counts of trained tokens")
    add("--at-seconds", metavar="LIST", help="compare at these seconds of training")
    add("--table-only", action="store_true", help="make tables and pictures from the logs in DIR, train nothing")
    return parser


def main(argv: Sequence[str]) -> int:
    """Exit code 0 when all is complete, 1 when a run failed, 2 for a wrong call, 3 when it was stopped."""
    args, overrides = make_parser().parse_known_args(argv)
    try:
        _check(args, overrides)
        if args.table_only:
            return _report(args, *_names(args))
        comparison = Comparison(
            out=args.out,
            config=args.config,
            algorithms=parse_names(args.algorithms or ALGORITHMS),
            seeds=tuple(range(args.seeds)),
            overrides=tuple(overrides),
            start=_start(args),
            num_processes=args.processes,
        )
        comparison.check_folder()
        _prepare(comparison)
    except (ValueError, subprocess.CalledProcessError) as wrong:
        print(f"error: {wrong}", file=sys.stderr)
        return 2
    print(f"{len(comparison.runs())} runs below {args.out}; each one's output is in its output.txt", flush=True)
    outcome = run_all(comparison, args.jobs, lambda text: print(text, flush=True))
    code = STOPPED if outcome.stopped else 1 if outcome.failed else 0
    if any(args.out.glob("*/seed-*/log.jsonl")):
        _report(args, comparison.algorithms, comparison.seeds)
    if outcome.stopped:
        print("stopped; the same command goes on from here")
    return code


def _check(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    for name in ("seeds", "jobs", "processes"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} is {getattr(args, name)}: give at least 1")
    keys = [part.partition("=")[0] for part in overrides if part.startswith("--")]
    for key in keys:
        if "." not in key:
            raise ValueError(f"{key} is no option here and no --section.key of d3s_megatron.train; see --help")
        if key in OURS:
            raise ValueError(f"{key} is set for every run by --algorithms, --seeds and --out: leave it out")
    if not args.table_only and (args.config is None or not args.config.is_file()):
        raise ValueError(f"--config is {args.config}: give a YAML file of d3s_megatron.train")


def _start(args: argparse.Namespace) -> Path | None:
    beside = args.config.parent / "start.py"
    if args.start is not None and not args.start.is_file():
        raise ValueError(f"--start is {args.start}, which is no file: give a script that takes --seed and --out")
    return args.start or (beside if beside.is_file() else None)


def _prepare(comparison: Comparison) -> None:
    """Starts of all seeds and settings of all algorithms, before the first run: a wrong key ends the call at once."""
    from d3s_megatron.config import parse_config

    for seed in comparison.seeds:
        prepare_start(comparison, seed)
    for run in comparison.runs()[: len(comparison.algorithms)]:
        parse_config(run.arguments())


def _names(args: argparse.Namespace) -> tuple[tuple[str, ...], tuple[int, ...]]:
    algorithms, seeds = find_runs(args.out)
    if not algorithms:
        raise ValueError(f"--out {args.out} holds no runs: a run is a folder ALGORITHM/seed-N with a log.jsonl")
    known = parse_names(args.algorithms or ALGORITHMS)
    if args.algorithms:
        return known, seeds
    return tuple(sorted(algorithms, key=lambda name: known.index(name) if name in known else len(known))), seeds


def _report(args: argparse.Namespace, algorithms: Sequence[str], seeds: Sequence[int]) -> int:
    """Prints the tables and writes table.md, table.csv, curves.csv and the pictures into the folder."""
    curves = read_all(args.out, algorithms, seeds, "time/step" if args.clock == "wall" else "time/cpu")
    if not curves:
        print("no run has an evaluation yet: there is nothing to compare")
        return 0
    given: dict[Axis, str | None] = {"step": args.at_steps, "tokens": args.at_tokens, "seconds": args.at_seconds}
    where = {axis: _places(given[axis], curves, axis) for axis in AXES}
    tables, cells = compare(curves, where)
    print("\n" + "\n".join(table.as_text() for table in tables))
    clock = "wall clock" if args.clock == "wall" else "processor seconds of the first rank"
    note = f"Mean over seeds ± half the width of its 95% t interval; seconds are of training only, {clock}.\n"
    (args.out / "table.md").write_text("\n".join([note, *(table.as_markdown() for table in tables)]))
    write_csv(cells, args.out / "table.csv")
    write_curves(curves, args.out / "curves.csv")
    files = [args.out / name for name in ("table.md", "table.csv", "curves.csv")] + draw(curves, args.out)
    print("\n".join(f"  {path}" for path in files), flush=True)
    return 0


def _places(given: str | None, curves: Sequence[RunCurve], axis: Axis) -> list[float]:
    if given is None:
        return places(curves, axis)
    try:
        return [float(part) for part in given.split(",")]
    except ValueError:
        raise ValueError(f"{given!r} is no list of numbers: give them joined by commas, e.g. 40,160") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
