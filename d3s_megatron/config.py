"""The configuration of a run: one frozen dataclass per owner, joined here, and its command line.

    CONFIG.yaml --section.key value ...      later wins; every key is a field with a docstring, shown by --help

This file stands on the top floor: it joins what the rooms below declare in their own config.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal, NoReturn

import yaml
from jsonargparse import ArgumentParser, set_parsing_settings

from d3s_megatron.actor.config import ActorConfig, OptimizerConfig
from d3s_megatron.algorithms.config import AlgorithmConfig
from d3s_megatron.algorithms.recipes import make_recipe
from d3s_megatron.data.config import DataConfig
from d3s_megatron.launch import say_error
from d3s_megatron.rewards.config import RewardConfig
from d3s_megatron.rollout.config import RolloutConfig

set_parsing_settings(docstring_parse_attribute_docstrings=True)


@dataclass(frozen=True)
class TrainConfig:
    """Length, seeds and outputs of the run."""

    output_dir: str = "runs/d3s"
    """Folder for the log, the plots, the resolved config and the exported model."""
    steps: int = 100
    """Rollout batches to train on; N and rho reach their last values at the last one."""
    prompts_per_step: int = 32
    """P, prompts in one rollout batch, over all ranks."""
    seed: int = 0
    """Seed of prompt order, sampling and tie-breaking."""
    eval_every: int = 0
    """Evaluate every so many steps as well as before the first and after the last; 0 leaves those two."""
    eval_samples: int = 32
    """Answers per evaluation problem, at the rollout temperature."""
    max_bad_steps: int = 3
    """End the run after so many steps in a row whose loss or gradient is not finite; such a step is skipped."""
    overwrite: bool = False
    """Replace an earlier run in output_dir instead of refusing to start."""
    export: bool = True
    """Write the trained model as a Hugging Face folder to output_dir/export."""

    def __post_init__(self) -> None:
        for name in ("steps", "prompts_per_step", "eval_samples", "max_bad_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"train.{name} is {getattr(self, name)}: give at least 1")
        if self.eval_every < 0:
            raise ValueError(f"train.eval_every is {self.eval_every}: give 0 or more steps")


@dataclass(frozen=True)
class CheckpointConfig:
    """When a run is saved, and what it goes on from."""

    every: int = 50
    """Save after every so many training steps, and after the last one of a longer run; 0 saves never."""
    keep: int = 3
    """Whole checkpoints that are kept; older ones are removed once a newer one is whole."""
    resume: str = "auto"
    """auto goes on from the newest whole checkpoint in train.output_dir; never; or a checkpoint or run folder."""
    background: bool = False
    """Let training go on while a checkpoint is written, from a copy of the weights in memory."""
    export_every: int = 0
    """Write the model as a Hugging Face folder to output_dir/exports at every so many saves; 0 leaves it out."""
    override_optimizer: bool = False
    """On resume take this configuration's optimizer settings where they differ from the checkpoint's."""
    force: bool = False
    """Resume although the model or the order of the data is not that of the checkpoint."""

    def __post_init__(self) -> None:
        for name in ("every", "export_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"checkpoint.{name} is {getattr(self, name)}: give 0 (off) or more")
        if self.keep < 1:
            raise ValueError(f"checkpoint.keep is {self.keep}: give at least 1")
        if not self.resume:
            raise ValueError("checkpoint.resume is empty: give auto, never or a folder")


@dataclass(frozen=True)
class ProbeConfig:
    """Measurements on all rollouts of a step, kept or not; their seconds are no part of the step's."""

    every: int = 0
    """Probe at the first, at every so many training steps, and at the last; 0 is off. Keeps the first weights."""
    responses: int = 0
    """Responses whose own gradients are taken for the propositions' gamma, one backward pass each; 0 leaves all
    gradients out and only scores."""

    def __post_init__(self) -> None:
        for name in ("every", "responses"):
            if getattr(self, name) < 0:
                raise ValueError(f"probe.{name} is {getattr(self, name)}: give 0 (off) or more")

    def is_due(self, step: int, num_steps: int) -> bool:
        """Whether `step` (from 0) is probed."""
        return bool(self.every) and (step % self.every == 0 or step == num_steps - 1)


@dataclass(frozen=True)
class AuditConfig:
    """What is kept of every step for people to look at, and for running a step again."""

    every: int = 1
    """Write output_dir/audit/step-....parquet, what was kept and why, at every so many steps; 0 writes none."""
    tokens_every: int = 10
    """At every so many steps it holds tokens with their scores too; 0 leaves them out."""
    num_prompts: int = 3
    """Prompts whose rollouts' tokens it then holds, from the one most is kept of to the one least is."""
    rollouts: Literal["none", "recent", "all"] = "recent"
    """Rollouts saved for d3s_megatron.replay: none, those since the oldest checkpoint that is kept, or all."""

    def __post_init__(self) -> None:
        for name in ("every", "tokens_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"audit.{name} is {getattr(self, name)}: give 0 (off) or more steps")
        if self.num_prompts < 1:
            raise ValueError(f"audit.num_prompts is {self.num_prompts}: give at least 1, or audit.tokens_every 0")


@dataclass(frozen=True)
class ReportConfig:
    """Where a run is logged beside log.jsonl and TensorBoard."""

    trackers: tuple[Literal["wandb", "mlflow", "trackio"], ...] = ()
    """Experiment trackers to write to as well, e.g. [wandb]; each must be installed and knows its own address."""
    project: str = "d3s_megatron"
    """Project, or MLflow experiment, of the entry."""
    name: str = ""
    """Name of the entry; empty takes that of train.output_dir."""


@dataclass(frozen=True)
class WatchConfig:
    """The watchdog: what happens when a rank stays in one phase (rollout, reward, update, ...)."""

    stall_minutes: float = 5.0
    """Dump all stacks and name the ranks that are waited for after so long in one phase; 0 is off."""
    end_minutes: float = 60.0
    """End the process after so long in one phase, above the longest rollout or evaluation; 0 is off."""

    def __post_init__(self) -> None:
        for name in ("stall_minutes", "end_minutes"):
            if getattr(self, name) < 0:
                raise ValueError(f"watch.{name} is {getattr(self, name)}: give 0 (off) or more minutes")


@dataclass(frozen=True)
class LaunchConfig:
    """What the launch is expected to have brought together."""

    world_size: int = 0
    """Refuse to train with another number of ranks; 0 takes whatever has joined."""

    def __post_init__(self) -> None:
        if self.world_size < 0:
            raise ValueError(f"launch.world_size is {self.world_size}: give 0 (any) or the number of ranks")


@dataclass(frozen=True)
class ModelConfig:
    """The model that is trained."""

    path: str = ""
    """Hugging Face folder with config.json, safetensors and tokenizer (Qwen2, Qwen2.5, Qwen3, Llama, Mistral)."""


@dataclass(frozen=True)
class RunConfig:
    """Everything a run is made of."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    rewards: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    probe: ProbeConfig = field(default_factory=ProbeConfig)
    audit: AuditConfig = field(default_factory=AuditConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)

    def __post_init__(self) -> None:
        make_recipe(self.algorithm)
        if not self.model.path:
            raise ValueError("model.path is empty: name a Hugging Face folder, e.g. --model.path models/my-model")
        if not Path(self.model.path).is_dir():
            raise ValueError(f"model.path is {self.model.path!r}, which is no folder: download the model first")
        if not self.data.train_path:
            raise ValueError("data.train_path is empty: name a JSONL or Parquet file with problems and answers")


class _Parser(ArgumentParser):
    """Reports a wrong argument in one line with its remedy; jsonargparse prints the usage as well."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        fail(" ".join(str(ex or message).split()) + "; --help lists every key with its type")


def fail(message: str) -> NoReturn:
    """Ends every rank with exit code 2, and with one line on standard error in all; before any process group exists."""
    say_error(message)
    raise SystemExit(2)


def make_parser() -> ArgumentParser:
    """The command line of `python -m d3s_megatron.train`."""
    parser = _Parser(
        prog="python -m d3s_megatron.train",
        description="Trains a model with D3S, or any recipe it is made of, on Megatron-core.",
        usage="python -m d3s_megatron.train [CONFIG.yaml] [--section.key VALUE ...] [--print-config]",
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="config", help="YAML file; the same as giving its path first")
    parser.add_class_arguments(RunConfig)
    return parser


def parse_config(argv: Sequence[str]) -> RunConfig:
    """The resolved, checked configuration; ends with one line and exit code 2 where it is wrong."""
    args = ["--print_config" if arg == "--print-config" else arg for arg in argv]
    if args and not args[0].startswith("-"):
        if not Path(args[0]).is_file():
            fail(f"{args[0]} is no file: give a YAML file first, or --section.key value")
        args = ["--config", *args]
    parser = make_parser()
    parsed = parser.parse_args(args)
    parsed.pop("config", None)
    try:
        return _resolve(RunConfig(**vars(parser.instantiate(parsed))))
    except ValueError as wrong:
        fail(str(wrong))


def _resolve(config: RunConfig) -> RunConfig:
    """With the values that depend on the engine filled in."""
    algorithm, rollout = config.algorithm, config.rollout
    built_in = rollout.engine == "transformers"
    if algorithm.rollout_correction is None:
        algorithm = replace(algorithm, rollout_correction="none" if built_in else "token")
    if rollout.probe_after_sync is None:
        rollout = replace(rollout, probe_after_sync=not built_in)
    return replace(config, algorithm=algorithm, rollout=rollout)


def save_config(config: RunConfig, path: Path) -> None:
    """Writes the full, resolved configuration as YAML that `parse_config` reads back to the same value."""
    path.write_text(yaml.safe_dump(asdict(config), sort_keys=False))
