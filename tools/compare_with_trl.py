"""Plain GRPO beside TRL's GRPOTrainer: the same model, data, prompts a step and settings; curves, and seconds a step.

    python3 -m venv /somewhere/trl && /somewhere/trl/bin/pip install trl
    python tools/compare_with_trl.py --trl-python /somewhere/trl/bin/python --out runs/trl

Curves: held-out accuracy of both over seeds, in the tables and pictures of d3s_megatron.ablate. They are of two
programs that share no code, so for plain GRPO they must agree within their intervals.
Speed: both in turn, again and again, on one process and on two (data parallel), at the same batch; the mean step, and
that of D3S over its whole schedule.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from d3s_megatron.ablate.__main__ import main as ablate
from d3s_megatron.ablate.results import over_seeds, paired, read_all
from d3s_megatron.ablate.runs import Comparison, Run, prepare_start
from d3s_megatron.config import RunConfig, parse_config
from d3s_megatron.data import PromptOrder, load_problems
from d3s_megatron.report.log_file import LOG_FILE, read_log

WORKER = Path(__file__).resolve().with_name("trl_grpo.py")
CONFIG = WORKER.parent.parent / "examples" / "arithmetic" / "ablation.yaml"
WARM_STEPS = 5  # left out of the mean: buffers, caches


def write_job(config: RunConfig, out: Path, evaluate: bool) -> Path:
    """The settings of a run of ours as a job for TRL."""
    problems = load_problems(config.data.train_path, config.data)
    order = PromptOrder(len(problems), config.train.prompts_per_step, config.train.seed)
    chosen = [problems[i] for step in range(config.train.steps) for i in order.batch(step)]
    held_out = load_problems(config.data.eval_path, config.data.for_evaluation()) if evaluate else []
    job = {
        "model": config.model.path,
        "prompts": [{"prompt": p.problem, "answer": p.answer} for p in chosen],
        "held_out": [{"prompt": p.problem, "answer": p.answer} for p in held_out],
        "out": str(out),
        "seed": config.train.seed,
        "steps": config.train.steps,
        "prompts_per_step": config.train.prompts_per_step,
        "samples_per_prompt": config.algorithm.samples_per_prompt,
        "max_new_tokens": config.rollout.max_new_tokens,
        "lr": config.optimizer.lr,
        "eval_every": config.train.eval_every if evaluate else 0,
        "eval_samples": config.train.eval_samples,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "job.json").write_text(json.dumps(job))
    return out / "job.json"


def launch(python: str, arguments: Sequence[str], num_processes: int, out: Path) -> None:
    """Runs to its end with the output in out/output.txt; CalledProcessError where it fails."""
    launcher = [python]
    if num_processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
    out.mkdir(parents=True, exist_ok=True)
    with (out / "output.txt").open("w") as output:
        subprocess.run(
            [*launcher, *arguments], check=True, stdout=output, stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip


def curves(args: argparse.Namespace, comparison: Comparison) -> int:
    """Runs both for every seed, and makes the tables; what is there is kept."""
    code = ablate(
        ["--config", str(args.config), "--algorithms", "grpo", "--seeds", str(args.seeds), "--out", str(args.out)]
    )
    if code:
        return code
    for seed in comparison.seeds:
        out = args.out / "trl" / f"seed-{seed}"
        if (out / "summary.json").exists():
            continue
        job = write_job(parse_config(Run(comparison, "grpo", seed).arguments()), out, evaluate=True)
        launch(args.trl_python, [str(WORKER), str(job)], 1, out)
        print(f"TRL, seed {seed}: done", flush=True)
    ablate(["--out", str(args.out), "--algorithms", "grpo,trl", "--table-only"])
    both = read_all(args.out, ("grpo", "trl"), comparison.seeds, "time/step")
    apart = []
    for step in both[0].axes["step"]:
        one, two = (over_seeds(both, name, "step", step) for name in ("grpo", "trl"))
        difference = paired(both, "trl", "grpo", "step", step)
        meet = one.low <= two.high and two.low <= one.high
        apart += [] if meet else [step]
        print(
            f"  step {step:4g}: ours {one.mean:.3f} [{one.low:.3f}, {one.high:.3f}], TRL {two.mean:.3f} "
            f"[{two.low:.3f}, {two.high:.3f}], minus ours {difference.mean:+.3f} ± {difference.half:.3f}"
        )
    print("the intervals overlap everywhere" if not apart else f"the intervals do not overlap after steps {apart}")
    return 0


def speed(args: argparse.Namespace, comparison: Comparison, num_processes: int) -> dict[str, float]:
    """Seconds of a step of our GRPO, our D3S and TRL's GRPO: all in turn, `--rounds` times; means without warm-up."""
    found: dict[str, list[float]] = {}
    extra = {"train.steps": args.speed_steps, "train.eval_every": 0, "probe.every": 0, "checkpoint.every": 0}
    flags = [part for key, value in extra.items() for part in (f"--{key}", str(value))]
    for turn in range(args.rounds):
        for name in ("grpo", "d3s", "trl"):
            folder = args.out / "speed" / f"{num_processes}-processes-{turn}" / name
            run = [*Run(comparison, "d3s" if name == "d3s" else "grpo", 0).arguments(), *flags]
            if name == "trl":
                job = write_job(parse_config(run), folder, evaluate=False)
                launch(args.trl_python, [str(WORKER), str(job)], num_processes, folder)
            else:
                run += ["--data.eval_path", "", "--train.output_dir", str(folder), "--train.overwrite", "true"]
                launch(sys.executable, ["-m", "d3s_megatron.train", *run], num_processes, folder)
            rows = [row for row in read_log(folder / LOG_FILE) if "progress" in row]
            found.setdefault(name, []).extend(row["time/step"] for row in rows[WARM_STEPS:])
    return {name: statistics.fmean(seconds) for name, seconds in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", required=True, help="python of an environment that has trl")
    parser.add_argument("--config", type=Path, default=CONFIG, help="default examples/arithmetic/ablation.yaml")
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0 to N-1 for the curves (default 3)")
    parser.add_argument("--out", type=Path, default=Path("runs/trl"), help="folder for everything written")
    parser.add_argument("--only", choices=("curves", "speed"), help="one of the two (default both)")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each in the speed part (default 2)")
    parser.add_argument(
        "--speed-steps", type=int, default=20, help=f"steps a turn, {WARM_STEPS} not counted (default 20)"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    start = args.config.parent / "start.py"
    comparison = Comparison(
        args.out, args.config, ("grpo",), tuple(range(args.seeds)), (), start if start.is_file() else None
    )
    prepare_start(comparison, 0)
    if args.only != "speed":
        code = curves(args, comparison)
        if code:
            return code
    if args.only != "curves":
        lines = [
            "| processes | GRPO, s a step | D3S | TRL's GRPO | GRPO / TRL | D3S / TRL |",
            "|---|---|---|---|---|---|",
        ]
        for num in (1, 2):
            one = speed(args, comparison, num)
            cells = [f"{one[name]:.3f}" for name in ("grpo", "d3s", "trl")]
            cells += [f"{one[name] / one['trl']:.2f}" for name in ("grpo", "d3s")]
            lines.append(f"| {num} | " + " | ".join(cells) + " |")
        print("\n" + "\n".join(lines))
        (args.out / "speed.md").write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
