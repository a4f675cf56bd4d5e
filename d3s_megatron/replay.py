"""Runs a step of a finished or running training again, without the rollout engine, and compares it with the original.

    python -m d3s_megatron.replay RUN --step 45                     the same kept ids, loss and gradients, bit for bit
    python -m d3s_megatron.replay RUN --step 45 --algorithm pods    another selection on the same rollouts and weights

It loads the newest whole checkpoint at or before the step (or the first weights), takes the steps between from their
saved rollouts, each compared with the log, and then the step itself. Nothing in RUN is written. A run on several ranks
is replayed by as many: torchrun --nproc-per-node N -m d3s_megatron.replay ... Bits are equal at the same layout and
number of threads on a CPU; elsewhere numbers agree to rounding.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import record

from d3s_megatron.actor.checkpoint import load as load_checkpoint
from d3s_megatron.actor.megatron_actor import MegatronActor
from d3s_megatron.actor.parallel import Layout, init_parallel, shutdown
from d3s_megatron.algorithms import recipes
from d3s_megatron.algorithms.schedules import Amounts
from d3s_megatron.audit.files import ROLLOUTS, audit_file, files_of, read_audit, step_of
from d3s_megatron.audit.gather import Gathered, StepRecord, gather
from d3s_megatron.audit.rollouts import load_rollouts
from d3s_megatron.build import make_actor
from d3s_megatron.checkpointing import newest_whole, steps_of
from d3s_megatron.config import RunConfig, fail, parse_config
from d3s_megatron.learner import Learner
from d3s_megatron.report.log_file import LOG_FILE, json_value, read_log
from d3s_megatron.train import quiet_libraries
from d3s_megatron.types import Experience

# What is compared, as the table shows it: (name in the log, heading).
NUMBERS = (
    ("num_kept", "kept rollouts"),
    ("num_scored_tokens", "their tokens"),
    ("num_kept_tokens", "kept tokens"),
    ("loss", "loss"),
    ("grad_norm", "gradient norm"),
    ("entropy", "entropy"),
    ("entropy_kept", "entropy of kept"),
    ("kl", "KL"),
    ("policy_kl", "policy KL"),
    ("sur", "SUR"),
    ("advantage_variance_kept", "variance of kept"),
)

# What decides N and rho; where they are as they were, the log says what the step took, whatever triggered it.
AMOUNT_SETTINGS = (
    *("name", "schedule", "samples_per_prompt", "kept_per_prompt_init", "kept_per_prompt_final"),
    *("token_share_init", "token_share_final"),
)


@dataclass(frozen=True)
class Replayed:
    """One step as it ran again."""

    row: dict[str, Any]  # as the log's, without times and verdict counts
    selected: Experience
    gathered: Gathered


@dataclass(frozen=True)
class Replay:
    """What it takes to run steps of one run again; every method is a collective over all ranks.

    Args:
        run: its folder.
        config: that of the run, the layout changed at most.
        with_reference: keep the first weights beside the policy, for the KL.
    """

    run: Path
    config: RunConfig
    layout: Layout
    actor: MegatronActor
    log: dict[int, dict[str, Any]]  # step from 0 -> its row

    def step(self, step: int, config: RunConfig | None = None) -> Replayed:
        """Takes one step, which counts from 0, from the weights as they are; `config` gives another algorithm."""
        settings, layout, actor = config or self.config, self.layout, self.actor
        algorithm, seed = settings.algorithm, settings.train.seed
        recipe, loss = recipes.make_recipe(algorithm), recipes.make_loss(algorithm)
        if all(getattr(algorithm, name) == getattr(self.config.algorithm, name) for name in AMOUNT_SETTINGS):
            row = self.log[step]
            amounts = Amounts(row["progress"], row["N"], row["rho"])
        else:
            amounts = recipes.amounts(algorithm, step, settings.train.steps)
        rollouts, verdicts = load_rollouts(self.run, step, layout.rank, layout.world_size)
        learner = Learner(algorithm, recipe, loss, actor, settings.rollout.max_new_tokens)
        learned = learner.step(seed, step, amounts, rollouts, verdicts)
        known = StepRecord((), rollouts, verdicts, learned.judged, learned.selected, learned.batch)
        gathered = gather(known, actor, layout, [], updated=learned.row["num_updates"] > 0)
        return Replayed(learned.row, learned.selected, gathered)


def differing(row: Mapping[str, Any], logged: Mapping[str, Any]) -> list[str]:
    """Names whose values are not the same to the last bit; a value that is not finite is null in the log."""
    return [name for name, value in row.items() if json_value(value) != logged.get(name)]


def starting_point(run: Path, step: int) -> tuple[int, Path | None]:
    """(steps done, checkpoint) to begin from for a step that counts from 0: (0, None) are the first weights."""
    folder, _ = newest_whole(run / "checkpoints", at_most=step)
    return (0, None) if folder is None else (steps_of(folder), folder)


def check_saved(run: Path, first: int, step: int, log: Mapping[int, Any]) -> None:
    """ValueError where the log or the rollouts of a step from `first` to `step` are not there."""
    if step not in log:
        steps = f"steps {min(log) + 1} to {max(log) + 1}" if log else "no step"
        raise ValueError(f"--step is {step + 1}: the log of {run} has {steps}")
    saved = {step_of(path) for path in files_of(run, ROLLOUTS)}
    missing = [s for s in range(first, step + 1) if s not in saved]
    if missing:
        can = [s + 1 for s in sorted(log) if all(t in saved for t in range(starting_point(run, s)[0], s + 1))]
        raise ValueError(
            f"--step is {step + 1}: rollouts of step {missing[0] + 1} are not saved (audit.rollouts), "
            + (f"steps {can[0]} to {can[-1]} can run again" if can else "no step can run again")
        )


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m d3s_megatron.replay",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="python -m d3s_megatron.replay RUN --step S [--algorithm NAME] [--json FILE] [--section.key VALUE ...]",
        epilog="--algorithm.KEY VALUE changes that setting for the step itself; --actor.KEY VALUE the layout of all.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="output folder of a run")
    parser.add_argument("--step", type=int, required=True, help="training step, counted from 1 as on the screen")
    parser.add_argument("--algorithm", metavar="NAME", help="algorithm.name for this step, e.g. pods")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write both rows and the kept ids there too")
    return parser


def _configs(run: Path, algorithm: str | None, changes: Sequence[str]) -> tuple[RunConfig, RunConfig]:
    """(the run's configuration, that of the step)."""
    if not (run / "config.yaml").is_file() or not (run / LOG_FILE).is_file():
        raise ValueError(f"{run} is no run: it lacks config.yaml or {LOG_FILE}")
    layout: list[str] = []
    method = ["--algorithm.name", algorithm] if algorithm else []
    flags = [part for change in changes for part in change.split("=", 1)]
    if len(flags) % 2:
        raise ValueError(f"{' '.join(changes)}: give --section.key VALUE pairs")
    for key, value in zip(flags[::2], flags[1::2], strict=True):
        if not key.startswith(("--actor.", "--algorithm.")):
            raise ValueError(f"{key} cannot be changed in a replay: only --algorithm.KEY and --actor.KEY can")
        (layout if key.startswith("--actor.") else method).extend((key, value))
    yaml = str(run / "config.yaml")
    return parse_config([yaml, *layout]), parse_config([yaml, *layout, *method])


def _number(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def comparison(
    original: Mapping[str, Any], replayed: Replayed, audit: Mapping[str, Any] | None, kept: set[int] | None
) -> list[tuple[str, str, str, str]]:
    """Rows of the table: what, original, replay, difference.

    Args:
        original: the log's row.
        audit: its audit's checksums, None where no audit was written.
        kept: uids that the original kept, None likewise.
    """
    rows = []
    for name, heading in NUMBERS:
        before, after = original.get(name), json_value(replayed.row.get(name))
        if before is None and after is None:
            continue
        both = before is not None and after is not None
        same = "same" if before == after else _number(float(after - before)) if both else "-"
        rows.append((heading, _number(before), _number(after), same))
    now = set(replayed.selected.kept.nonzero().flatten().tolist())
    if kept is not None:
        common = "same" if now == kept else f"{len(now & kept)} in both"
        rows.insert(0, ("kept ids", str(len(kept)), str(len(now)), common))
    if audit:
        sums = {
            "kept_tokens": ("which tokens", replayed.gathered.kept_checksum),
            "gradients": ("gradients", replayed.gathered.gradients_checksum),
            "weights": ("weights after", replayed.gathered.weights_checksum),
        }
        for name, (heading, value) in sums.items():
            if audit[name] is not None and value is not None:
                equal = "same bits" if audit[name] == value else "other bits"
                rows.append((heading, f"{audit[name] & 0xFFFFFFFF:08x}", f"{value & 0xFFFFFFFF:08x}", equal))
    return rows


def replay(args: argparse.Namespace, changes: Sequence[str]) -> int:
    """Replays one step and prints the table; 1 where an unchanged replay is not the original bit for bit."""
    run, step = args.run, args.step - 1
    try:
        base, config = _configs(run, args.algorithm, changes)
        log = {row["step"]: row for row in read_log(run / LOG_FILE) if "progress" in row}
        first, checkpoint = starting_point(run, step)
        check_saved(run, first, step, log)
        layout = init_parallel(base.actor)
    except ValueError as wrong:
        fail(str(wrong))
    betas = [recipes.make_loss(c.algorithm).kl_beta for c in (base, config)]
    actor = make_actor(base, layout, with_reference=max(betas) > 0)
    say = print if layout.rank == 0 else lambda *_: None
    if checkpoint is not None:
        load_checkpoint(actor, checkpoint)
    say(f"weights: {checkpoint or base.model.path}, after step {first}")
    again = Replay(run, base, layout, actor, log)
    num_wrong = 0
    for between in range(first, step):
        others = differing(again.step(between).row, log[between])
        num_wrong += bool(others)
        if others:
            say(f"step {between + 1} again: differs from the log in {', '.join(others)}")
    if step > first:
        say(f"taken again before it: {step - first} steps, {step - first - num_wrong} equal the log in all bits")
    result = again.step(step, config)
    others = differing(result.row, log[step])
    file = audit_file(run, step)
    audit = read_audit(file) if file.exists() else None
    kept = None
    if audit:
        kept = {
            uid for uid, k in zip(audit.table["uid"].to_pylist(), audit.table["kept"].to_pylist(), strict=True) if k
        }
    rows = comparison(log[step], result, audit.meta["checksums"] if audit else None, kept)
    say(f"\n{'step ' + str(step + 1):<17} {'original':>16} {'replay':>16}   difference")
    say(f"{'':<17} {base.algorithm.name:>16} {config.algorithm.name:>16}")
    for heading, before, after, difference in rows:
        say(f"{heading:<17} {before:>16} {after:>16}   {difference}")
    if args.json and layout.rank == 0:
        ids = sorted(result.selected.kept.nonzero().flatten().tolist())
        args.json.write_text(
            json.dumps(
                {
                    "original": log[step],
                    "replay": {k: json_value(v) for k, v in result.row.items()},
                    "original_kept": sorted(kept) if kept is not None else None,
                    "replay_kept": ids,
                },
                indent=1,
            )
            + "\n"
        )
    shutdown()
    if base != config or changes:
        return 0
    equal = not (others or num_wrong) and not any(row[3] not in ("same", "same bits") for row in rows)
    say("\nequal in all bits" if equal else f"\nnot equal: {', '.join(others) or 'see above'}")
    return 0 if equal else 1


def main(argv: Sequence[str]) -> int:
    """The command line; exit code 1 where the replay differs from the original, 2 where it cannot be done."""
    args, changes = make_parser().parse_known_args(argv)
    quiet_libraries()
    warnings.filterwarnings("ignore", message="Please use DTensor")  # megatron-core's reading of a checkpoint
    return replay(args, changes)


if __name__ == "__main__":
    sys.exit(record(main)(sys.argv[1:]))
