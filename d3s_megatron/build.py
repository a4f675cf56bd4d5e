"""Builds the parts of a run from its configuration; what can be wrong is looked at before any process group exists."""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from d3s_megatron.actor.checkpoint import load as load_checkpoint
from d3s_megatron.actor.megatron_actor import MegatronActor
from d3s_megatron.actor.model import check_shape, check_transformer_engine
from d3s_megatron.actor.parallel import Layout, check_layout, init_parallel, world_reduce, world_size_from_env
from d3s_megatron.algorithms.policy_loss import PolicyLoss
from d3s_megatron.algorithms.recipes import Recipe, make_loss, make_recipe
from d3s_megatron.audit.writer import Audit
from d3s_megatron.checkpointing import Checkpoints, Progress
from d3s_megatron.config import RunConfig, save_config
from d3s_megatron.convert import HFFolder, read_shape
from d3s_megatron.data import PromptOrder, encode_prompts, load_problems
from d3s_megatron.data.config import DataConfig
from d3s_megatron.launch import describe_world
from d3s_megatron.report.log_file import LOG_FILE
from d3s_megatron.report.run_log import RunLog
from d3s_megatron.report.trackers import Trackers, check_installed, flat
from d3s_megatron.resume import Start, check_output, fingerprints, is_restart
from d3s_megatron.rewards import Reward, check_golds, make_reward
from d3s_megatron.rollout import RolloutEngine
from d3s_megatron.rollout.make import make_engine
from d3s_megatron.stopping import Stop
from d3s_megatron.sync_probe import check_sync
from d3s_megatron.types import Prompt
from d3s_megatron.watch import Watch


@dataclass(frozen=True)
class Questions:
    """The prompts of a run."""

    train: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]
    notes: tuple[str, ...]  # what was dropped and why, for the log
    prints: dict[str, str]  # fingerprints of model and training data


@dataclass(frozen=True)
class Parts:
    """Everything the training loop calls."""

    config: RunConfig
    layout: Layout
    questions: Questions
    order: PromptOrder
    engine: RolloutEngine
    reward: Reward
    actor: MegatronActor
    recipe: Recipe
    loss: PolicyLoss
    log: RunLog
    checkpoints: Checkpoints
    audit: Audit
    start: Progress  # where the training loop begins
    stop: Stop
    watch: Watch

    def prompts_of(self, step: int) -> list[Prompt]:
        """The batch's prompts, the same on every rank."""
        return [self.questions.train[i] for i in self.order.batch(step)]

    def close(self) -> None:
        """Ends worker processes and closes files."""
        self.reward.close()
        self.engine.close()
        self.stop.close()
        self.watch.close()
        self.audit.close()
        self.log.close()


def preflight(config: RunConfig) -> Questions:
    """Checks what can be checked without a process group and reads the data; ValueError names what is wrong."""
    check_layout(config.actor, world_size_from_env())
    shape = read_shape(config.model.path)
    check_shape(shape, config.actor)
    check_transformer_engine(config.actor)
    HFFolder(config.model.path).check(shape)
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    if longest > shape.max_positions:
        raise ValueError(
            f"data.max_prompt_tokens {config.data.max_prompt_tokens} + rollout.max_new_tokens "
            f"{config.rollout.max_new_tokens} is more than the {shape.max_positions} positions of the model: lower one"
        )
    check_output(config)
    check_installed(config.report.trackers)
    return _questions(config)


def _questions(config: RunConfig) -> Questions:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(config.model.path, local_files_only=True)
    notes: list[str] = []

    def read(path: str, data: DataConfig, what: str) -> tuple[Prompt, ...]:
        problems = load_problems(path, data)
        if config.rewards.kind == "math_verify":
            bad = set(check_golds([(p.id, p.answer) for p in problems]))
            if bad:
                some = ", ".join(sorted(bad)[:5])
                notes.append(f"{what}: {len(bad)} problems dropped, their answers do not parse: {some}")
                problems = [p for p in problems if p.id not in bad]
        prompts, num_dropped = encode_prompts(problems, tokenizer, data)
        if num_dropped:
            notes.append(
                f"{what}: {num_dropped} prompts dropped, longer than data.max_prompt_tokens {data.max_prompt_tokens}"
            )
        return tuple(prompts)

    train = read(config.data.train_path, config.data, "training data")
    held_out: tuple[Prompt, ...] = ()
    if config.data.eval_path:
        held_out = read(config.data.eval_path, config.data.for_evaluation(), "evaluation data")
    return Questions(train, held_out, tuple(notes), fingerprints(config.model.path, train))


def _engine(config: RunConfig, layout: Layout) -> RolloutEngine:
    """This rank's engine, or its end of the rollout servers."""
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    if config.rollout.engine == "server":
        from d3s_megatron.rollout.server_engine import ServerEngine

        return ServerEngine(
            *(config.model.path, config.rollout, longest),
            rank=layout.rank,
            num_ranks=layout.world_size,
            share=_first_ranks,
            device=layout.device,
        )
    return make_engine(config.model.path, config.rollout, longest, layout.device)


def _first_ranks(value: Any) -> Any:
    """The first rank's value, on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def make_actor(config: RunConfig, layout: Layout, with_reference: bool) -> MegatronActor:
    """The policy of a run, at its first weights; `with_reference` keeps a copy of them beside it."""
    algorithm = config.algorithm
    return MegatronActor(
        config.model.path,
        config.actor,
        config.optimizer,
        layout,
        temperature=config.rollout.temperature,
        num_optimizer_steps=config.train.steps * algorithm.num_epochs * algorithm.num_minibatches,
        with_reference=with_reference,
    )


def build(config: RunConfig, questions: Questions, start: Start) -> Parts:
    """Joins the process group and makes the parts; a collective over all ranks."""
    layout = init_parallel(config.actor)
    world = describe_world(config.launch.world_size)
    folder = Path(config.train.output_dir)
    if layout.rank == 0:
        if config.train.overwrite and not is_restart() and (folder / LOG_FILE).exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        save_config(config, folder / "config.yaml")
    dist.barrier()
    watch = Watch(config, layout)
    loss, recipe = make_loss(config.algorithm), make_recipe(config.algorithm)
    step = start.progress.step
    trackers = None
    if config.report.trackers and layout.rank == 0:
        name = config.report.name or folder.resolve().name
        settings = flat(asdict(config))
        trackers = Trackers(config.report.trackers, config.report.project, name, settings, folder, goes_on=step > 0)
    log = RunLog(folder, layout.rank == 0, step, keep_last_evaluation=step < config.train.steps, trackers=trackers)
    parts = Parts(
        config=config,
        layout=layout,
        questions=questions,
        order=PromptOrder(len(questions.train), config.train.prompts_per_step, config.train.seed),
        engine=_engine(config, layout),
        reward=make_reward(config.rewards),
        actor=make_actor(config, layout, with_reference=loss.kl_beta > 0 or config.probe.every > 0),
        recipe=recipe,
        loss=loss,
        log=log,
        checkpoints=Checkpoints(config, questions.prints, layout, log),
        audit=Audit(config, recipe, layout, step),
        start=start.progress,
        stop=Stop(folder, layout),
        watch=watch,
    )
    log.message(world)
    if start.folder is not None:
        _resume(parts, start.progress.step, start.folder)
    if start.folder is not None or config.rollout.engine == "server":
        parts.engine.load_weights(parts.actor.weights())  # before its first answer (fault G04)
    if config.rollout.probe_after_sync:
        check_sync(parts.engine, parts.actor, questions.train, config, layout, "before the first rollout")
    for note in (*start.notes, *questions.notes, *config.rollout.warnings()):
        log.message(note)
    return parts


def _resume(parts: Parts, step: int, checkpoint: Path) -> None:
    steps = torch.tensor([step, -step])
    newest, negated_oldest = world_reduce(parts.layout)(steps, "max").tolist()
    if newest != -negated_oldest:
        raise RuntimeError(
            f"ranks found different checkpoints, after step {-negated_oldest} and after step {newest}: "
            f"train.output_dir {parts.config.train.output_dir} must be on a file system that all nodes share"
        )
    if not load_checkpoint(parts.actor, checkpoint):
        parts.log.message("per-rank random states were left as they are: the number of ranks has changed")
