"""Builds the parts of a run from its configuration; what can be wrong is looked at before any process group exists."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from d3s_megatron.actor.megatron_actor import MegatronActor
from d3s_megatron.actor.model import check_shape
from d3s_megatron.actor.parallel import Layout, check_layout, init_parallel, world_size_from_env
from d3s_megatron.algorithms.policy_loss import PolicyLoss
from d3s_megatron.algorithms.recipes import Recipe, make_loss, make_recipe
from d3s_megatron.config import RunConfig, save_config
from d3s_megatron.convert import HFFolder, read_shape
from d3s_megatron.data import PromptOrder, encode_prompts, load_problems
from d3s_megatron.data.config import DataConfig
from d3s_megatron.report.run_log import RunLog
from d3s_megatron.rewards import Reward, check_golds, make_reward
from d3s_megatron.rollout import RolloutEngine
from d3s_megatron.types import Prompt

LOG_FILE = "log.jsonl"


@dataclass(frozen=True)
class Questions:
    """The prompts of a run."""

    train: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]
    notes: tuple[str, ...]  # what was dropped and why, for the log


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

    def close(self) -> None:
        """Ends worker processes and closes files."""
        self.reward.close()
        self.engine.close()
        self.log.close()


def preflight(config: RunConfig) -> Questions:
    """Checks what can be checked without a process group and reads the data; ValueError names what is wrong."""
    check_layout(config.actor, world_size_from_env())
    shape = read_shape(config.model.path)
    check_shape(shape, config.actor)
    HFFolder(config.model.path).check(shape)
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    if longest > shape.max_positions:
        raise ValueError(
            f"data.max_prompt_tokens {config.data.max_prompt_tokens} + rollout.max_new_tokens "
            f"{config.rollout.max_new_tokens} is more than the {shape.max_positions} positions of the model: lower one"
        )
    if config.rollout.engine != "transformers":
        raise ValueError(f"rollout.engine is {config.rollout.engine!r}: only transformers is built in so far")
    _check_output(config)
    return _questions(config)


def _check_output(config: RunConfig) -> None:
    folder = Path(config.train.output_dir)
    if (folder / LOG_FILE).exists() and not config.train.overwrite:
        raise ValueError(
            f"train.output_dir {folder} holds an earlier run: choose another folder, or give --train.overwrite true"
        )


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
    return Questions(train, held_out, tuple(notes))


def build(config: RunConfig, questions: Questions) -> Parts:
    """Joins the process group and makes the parts; a collective over all ranks."""
    from d3s_megatron.rollout.transformers_engine import TransformersEngine

    layout = init_parallel(config.actor)
    folder = Path(config.train.output_dir)
    if layout.rank == 0:
        if config.train.overwrite and (folder / LOG_FILE).exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        save_config(config, folder / "config.yaml")
    dist.barrier()
    algorithm = config.algorithm
    loss = make_loss(algorithm)
    return Parts(
        config=config,
        layout=layout,
        questions=questions,
        order=PromptOrder(len(questions.train), config.train.prompts_per_step, config.train.seed),
        engine=TransformersEngine(config.model.path, config.rollout, layout.device),
        reward=make_reward(config.rewards),
        actor=MegatronActor(
            config.model.path,
            config.actor,
            config.optimizer,
            layout,
            temperature=config.rollout.temperature,
            num_optimizer_steps=config.train.steps * algorithm.num_epochs * algorithm.num_minibatches,
            with_reference=loss.kl_beta > 0,
        ),
        recipe=make_recipe(algorithm),
        loss=loss,
        log=RunLog(folder, is_main=layout.rank == 0),
    )
