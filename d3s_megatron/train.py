"""Trains a model: `torchrun --nproc-per-node N -m d3s_megatron.train CONFIG.yaml --section.key value ...`

Every rank runs this same story; with plain `python -m d3s_megatron.train` it is a world of one.
"""

from __future__ import annotations

import gc
import json
import shutil
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import record
from transformers.utils.logging import disable_progress_bar

from d3s_megatron import stages
from d3s_megatron.actor.parallel import gather_rows, shutdown
from d3s_megatron.ahead import RolloutSource
from d3s_megatron.algorithms import recipes
from d3s_megatron.audit.gather import StepRecord
from d3s_megatron.build import Parts, build, preflight
from d3s_megatron.checkpointing import Progress
from d3s_megatron.config import RunConfig, fail, parse_config
from d3s_megatron.convert import save_hf_folder
from d3s_megatron.evaluate import Evaluation, evaluate_policy, rank_share
from d3s_megatron.learner import Learner
from d3s_megatron.probe import probe
from d3s_megatron.report.log_file import LOG_FILE, SUMMARY_FILE, read_log
from d3s_megatron.report.plot import plot_run
from d3s_megatron.report.run_log import RunLog, StageClock
from d3s_megatron.resume import find_start, with_start
from d3s_megatron.rewards import grade_rollouts
from d3s_megatron.rollout.spread import PromptLengths, spread
from d3s_megatron.sync_probe import check_sync
from d3s_megatron.types import Experience, Rollout


def train(parts: Parts) -> Progress:
    """The training loop: one line a stage."""
    config, log = parts.config, parts.log
    algorithm, seed = config.algorithm, config.train.seed
    progress = parts.start
    totals, num_bad = Totals(**(progress.totals or {})), 0
    schedule = recipes.schedule_of(algorithm)
    rollout, layout = config.rollout, parts.layout
    learner = Learner(algorithm, parts.recipe, parts.loss, parts.actor, rollout.max_new_tokens, rollout.max_mismatch)
    lengths = PromptLengths(len(parts.questions.train), progress.lengths)
    source = RolloutSource(parts.engine, partial(generate, parts, lengths), config.train.steps, config.rollout.ahead)
    for step in range(progress.step, config.train.steps):
        clock = StageClock(partial(parts.watch.enter, step))
        amounts = recipes.amounts(algorithm, step, config.train.steps, progress.schedule)
        prompts = parts.prompts_of(step)
        with clock("rollout"):
            rollouts, staleness = source.take(step)
        with clock("reward"):
            verdicts = grade_rollouts(parts.reward, rollouts)
        probed: dict[str, float] = {}
        look = partial(probe_step, parts, step, rollouts, amounts.num_kept, clock, probed)
        most = 2 * algorithm.samples_per_prompt * -(-len(prompts) // layout.world_size)
        also = parts.reward.numbers()
        learned = learner.step(seed, step, amounts, rollouts, verdicts, clock, most, also, look)
        lengths.add(parts.order.batch(step), learned.judged.group_ids.tolist(), learned.judged.lengths.tolist())
        stepped = any(result.stepped for result in learned.updates)
        with clock("wait"):
            source.settle()
        with clock("sync"):
            if stepped:
                source.sync(parts.actor.weights())
        synced = {}
        if stepped and config.rollout.probe_after_sync:
            with clock("sync_probe"):
                after = f"after the weight sync of step {step + 1}"
                synced = check_sync(parts.engine, parts.actor, parts.questions.train, config, layout, after)

        row = learned.row | {"staleness": staleness}
        with clock("audit"):
            record = StepRecord(prompts, rollouts, verdicts, learned.judged, learned.selected, learned.batch)
            parts.audit.step(record, row, parts.actor)
        row |= parts.reward.report(learned.also) | probed | synced | clock.as_row()
        totals = totals.after(row)
        log.step(row | totals.as_row())
        if not stepped and not row["num_bad_updates"]:
            log.message(f"  step {step + 1}: no update, no kept token has an advantage to learn from")
        if config.train.eval_every and (step + 1) % config.train.eval_every == 0 and step + 1 < config.train.steps:
            evaluate(parts, step + 1)
        state = dict(schedule.after(progress.schedule, row))
        progress = Progress(step + 1, vars(totals), progress.seconds + row["time/step"], state, lengths.as_text())
        if row["num_updates"]:
            num_bad = 0
        if row["num_bad_updates"]:
            num_bad += 1
            check_bad_steps(config, step, num_bad, log)
        parts.watch.enter(step, "checkpoint")
        reason = parts.stop.wanted()
        parts.checkpoints.after_step(parts.actor, progress, is_last=step + 1 == config.train.steps)
        if reason and step + 1 < config.train.steps:
            leave(parts, progress, reason)
            break
    parts.checkpoints.close()
    return progress


def generate(parts: Parts, lengths: PromptLengths, step: int) -> list[Rollout]:
    """This rank's rollouts of a training step; no collective.

    Engines in these processes get prompts by the answers they expect. Servers are every rank's, and take its prompts as
    they get free.
    """
    algorithm, train, rollout = parts.config.algorithm, parts.config.train, parts.config.rollout
    share = None
    if rollout.engine != "server":
        ranks = rollout.vllm_tensor_parallel if rollout.engine == "vllm" else 1
        expected = lengths.expected(parts.order.batch(step))
        share = spread(expected, parts.layout.world_size // ranks, ranks)[parts.layout.rank]
    prompts, num = parts.prompts_of(step), algorithm.samples_per_prompt
    return stages.generate(parts.engine, prompts, num, rollout.sampling(), train.seed, step, parts.layout, share)


def probe_step(
    parts: Parts,
    step: int,
    rollouts: Sequence[Rollout],
    num_kept: int,
    clock: StageClock,
    found: dict[str, float],
    judged: Experience,
    selected: Experience,
) -> None:
    """Puts what a probe says into `found`, where one is due; its seconds are no part of the step's."""
    config = parts.config
    if config.probe.is_due(step, config.train.steps):
        with clock.apart("probe"):
            found |= probe(parts.actor, rollouts, judged, selected, num_kept, config.probe.responses, parts.layout)


def check_bad_steps(config: RunConfig, step: int, num_bad: int, log: RunLog) -> None:
    """Says that a step was skipped; FloatingPointError after `train.max_bad_steps` in a row."""
    most = config.train.max_bad_steps
    text = f"step {step + 1}: loss or gradient is not finite, the update was skipped ({num_bad} in a row, {most} end)"
    log.message(f"  {text}")
    if num_bad >= most:
        raise FloatingPointError(
            f"{text}; lower optimizer.lr or look at the rewards, and go on from the last checkpoint"
        )


def leave(parts: Parts, progress: Progress, reason: str) -> None:
    """Saves because the run was asked to end."""
    if parts.config.checkpoint.every:
        parts.checkpoints.save(parts.actor, progress, must=True)
        parts.log.message(f"{reason}: saved after step {progress.step}; the same command goes on from there")
    else:
        parts.log.message(f"{reason}: ended after step {progress.step}, not saved as checkpoint.every is 0")


def evaluate(parts: Parts, step: int) -> Evaluation | None:
    """Logs the held-out accuracy after `step` training steps; None without held-out problems."""
    prompts, layout, config = parts.questions.held_out, parts.layout, parts.config
    if not prompts:
        return None
    parts.watch.enter(max(0, step - 1), "evaluation")
    result = evaluate_policy(
        parts.engine,
        parts.reward,
        prompts,
        config.train.eval_samples,
        config.rollout.sampling(),
        config.train.seed,
        rank_share(len(prompts), layout.rank, layout.world_size),
        partial(gather_rows, layout=layout),
        config.rewards,
    )
    parts.reward.report()  # counts of the evaluation do not belong to the next step
    accuracy, *others = (f"pass@{k} {one.value:.3f}" for k, one in result.pass_at.items())
    accuracy += f" [{result.pass_at[1].low:.3f}, {result.pass_at[1].high:.3f}]"
    text = ", ".join([accuracy, *others, *(f"maj@{k} {one.value:.3f}" for k, one in result.maj_at.items() if k >= 8)])
    parts.log.event(
        {"step": step} | result.as_row(),
        f"held-out after {step} steps: {text} ({result.num_problems} problems x {result.num_samples} answers)",
    )
    return result


@dataclass(frozen=True)
class Totals:
    """What the run has spent so far."""

    tokens_generated: int = 0
    tokens_scored: int = 0
    tokens_trained: int = 0
    steps_without_update: int = 0

    def after(self, row: dict[str, Any]) -> Totals:
        """With one more step's log row."""
        updated = row["num_updates"] > 0
        return replace(
            self,
            tokens_generated=self.tokens_generated + round(row["response_length"] * row["num_rollouts"]),
            tokens_scored=self.tokens_scored + row["num_scored_tokens"],
            tokens_trained=self.tokens_trained + (row["num_kept_tokens"] if updated else 0),
            steps_without_update=self.steps_without_update + (not updated),
        )

    def as_row(self) -> dict[str, int]:
        """For the log."""
        return {"tokens_generated": self.tokens_generated, "tokens_trained": self.tokens_trained}


def finish(parts: Parts, progress: Progress) -> None:
    """Exports the model and writes the summary and the plot; a collective."""
    folder, log = Path(parts.config.train.output_dir), parts.log
    export = folder / "export"
    if parts.config.train.export:
        if parts.layout.rank == 0:
            if export.exists():  # of a shorter run that this one went on from
                shutil.rmtree(export)
            save_hf_folder(export, parts.actor.shape, parts.actor.weights(), parts.config.model.path)
        else:
            for _ in parts.actor.weights():
                pass
    if parts.layout.rank != 0:
        return
    summary = {
        "algorithm": parts.config.algorithm.name,
        "seed": parts.config.train.seed,
        "steps": parts.config.train.steps,
        "world_size": parts.layout.world_size,
        "train_seconds": round(progress.seconds, 2),
        **(progress.totals or {}),
    }
    rows = read_log(folder / LOG_FILE)
    for when, step in (("before", 0), ("after", progress.step)):
        for row in rows:
            if row["step"] == step and "eval/pass@1" in row:
                pass_at = {int(k.removeprefix("eval/pass@")): v for k, v in row.items() if k.startswith("eval/pass@")}
                summary[f"accuracy_{when}"] = pass_at[1]
                summary |= {f"pass{k}_{when}": value for k, value in pass_at.items() if k > 1}
    plot_run(rows, folder / "plot.png", f"{parts.config.algorithm.name}, {folder}")
    (folder / SUMMARY_FILE).write_text(json.dumps(summary, indent=2) + "\n")
    log.message("")
    for name, value in summary.items():
        log.message(f"  {name:<22} {value:.4g}" if isinstance(value, float) else f"  {name:<22} {value}")
    log.message("")
    written = {"log": LOG_FILE, "TensorBoard": "tensorboard", "plot": "plot.png", "config": "config.yaml"}
    written |= {"summary": SUMMARY_FILE} | ({"model": "export"} if parts.config.train.export else {})
    for name, file in written.items():
        log.message(f"  {name:<22} {folder / file}")
    log.message(f"  {'to look at it':<22} python -m d3s_megatron.report {folder}")


def run(config: RunConfig) -> None:
    """One whole run: checks, evaluation, training, evaluation, export."""
    try:
        questions = preflight(config)
        start = find_start(config, questions.prints)
    except ValueError as wrong:
        fail(str(wrong))
    config = with_start(config, start)
    parts = build(config, questions, start)
    # Libraries and models stay: to look through them takes the garbage collector 0.1 s, each rank at its own time.
    gc.collect()
    gc.freeze()
    try:
        if parts.start.step == 0:
            evaluate(parts, 0)
        progress = train(parts)
        if progress.step == config.train.steps:
            evaluate(parts, progress.step)
            parts.watch.enter(progress.step - 1, "export")
            finish(parts, progress)
    except Exception as failed:
        parts.watch.report(failed)
        raise
    finally:
        gc.unfreeze()
        parts.close()
    shutdown()


def quiet_libraries() -> None:
    """Keeps start-up chatter of torch, transformers and megatron-core, once a rank, out of the table."""
    warnings.filterwarnings("ignore", module=r"(torch|transformers|megatron)\.")
    disable_progress_bar()


def main(argv: Sequence[str]) -> None:
    """The command line."""
    config = parse_config(argv)
    quiet_libraries()
    run(config)


if __name__ == "__main__":
    record(main)(sys.argv[1:])  # torchrun shows the first rank's failure that was recorded
