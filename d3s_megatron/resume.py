"""Where a run starts: at its first step, or after the newest whole checkpoint, and with which configuration.

Every rank decides this for itself from the same files, before any process group exists.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from d3s_megatron.actor.config import OptimizerConfig
from d3s_megatron.checkpointing import MANIFEST, Progress, newest_whole, root_of, unfinished, why_broken
from d3s_megatron.config import RunConfig
from d3s_megatron.report.log_file import LOG_FILE, SUMMARY_FILE
from d3s_megatron.types import Prompt

# What may differ without a word, and what decides which prompts come when.
SILENT = ("train.output_dir", "train.overwrite", "checkpoint.", "audit.", "report.", "probe.", "watch.", "launch.")
ORDER = ("train.seed", "train.prompts_per_step")


@dataclass(frozen=True)
class Start:
    """Where to start and what to say about it."""

    progress: Progress = Progress()
    folder: Path | None = None  # the checkpoint to load
    optimizer: OptimizerConfig | None = None  # the checkpoint's, where it wins over the configuration's
    notes: tuple[str, ...] = ()


def is_restart() -> bool:
    """Whether a launcher started these processes again: torchrun after a failure, or Slurm after a requeue."""
    return any(int(os.environ.get(name, "0")) for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))


def check_output(config: RunConfig) -> None:
    """ValueError where the output folder holds a run that this one would neither continue nor may replace."""
    folder = Path(config.train.output_dir)
    settings = config.checkpoint
    if not (folder / LOG_FILE).exists() or (config.train.overwrite and not is_restart()):
        return
    newest, _ = newest_whole(root_of(config))
    if settings.resume == "auto" and newest is not None:
        return
    if newest is not None and is_restart() and settings.resume != "never":
        return
    if settings.resume != "never" and newest is None and _stopped_before_its_first_save(config):
        return
    raise ValueError(
        f"train.output_dir {folder} holds an earlier run: choose another folder, or give --train.overwrite true"
    )


def _stopped_before_its_first_save(config: RunConfig) -> bool:
    """Whether the folder holds this very run, cut short with nothing to lose but the steps before a first save."""
    folder = Path(config.train.output_dir)
    if not config.checkpoint.every or (folder / SUMMARY_FILE).exists() or not (folder / "config.yaml").exists():
        return False
    earlier = yaml.safe_load((folder / "config.yaml").read_text())
    return isinstance(earlier, dict) and not changes(earlier, asdict(config))


def find_start(config: RunConfig, prints: Mapping[str, str]) -> Start:
    """The checkpoint to go on from, if any; ValueError where that would not be the same run.

    Args:
        prints: fingerprints of model and data as they are now.
    """
    settings, root = config.checkpoint, root_of(config)
    fresh = Path(config.train.output_dir)
    if settings.resume == "never" or (config.train.overwrite and not is_restart()):
        return Start()
    folder, notes = newest_whole(root)
    if folder is None and settings.resume != "auto":
        folder = _named(Path(settings.resume))
    if folder is None:
        if notes:
            raise ValueError(f"no checkpoint below {root} is whole: " + "; ".join(notes))
        if (fresh / LOG_FILE).exists():
            notes.append(f"{fresh} holds no checkpoint yet: the run starts again at step 1")
        return Start(notes=tuple(notes))
    notes += [f"{left} is a save that never ended, it is passed over" for left in unfinished(root)]
    record = json.loads((folder / MANIFEST).read_text())
    step = record["step"]
    if step > config.train.steps or (step == config.train.steps and (fresh / SUMMARY_FILE).exists()):
        raise ValueError(
            f"train.steps is {config.train.steps}, and {folder} stands after step {step}: there is nothing left to "
            "train; give more steps, or another train.output_dir"
        )
    optimizer = _optimizer(record, config, notes)
    notes += _check_changes(record, config, prints)
    progress = Progress(
        step, record["totals"], record["seconds"], record.get("schedule", {}), record.get("lengths", "")
    )
    return Start(progress, folder, optimizer, (f"resumed from {folder}, after step {step}", *notes))


def _named(folder: Path) -> Path:
    if folder.name == "latest" and folder.is_file():
        folder = folder.parent / folder.read_text().strip()
    if not (folder / MANIFEST).exists() and (folder / "checkpoints").is_dir():
        folder = folder / "checkpoints"
    if (folder / MANIFEST).exists():
        reason = why_broken(folder)
        if reason:
            raise ValueError(f"checkpoint.resume {folder} is damaged: {reason}")
        return folder
    newest, _ = newest_whole(folder)
    if newest is None:
        raise ValueError(
            f"checkpoint.resume is {str(folder)!r}, which holds no whole checkpoint: give auto, never, a step-... "
            "folder, or the output folder of a run"
        )
    return newest


def _optimizer(record: dict[str, Any], config: RunConfig, notes: list[str]) -> OptimizerConfig | None:
    """The checkpoint's optimizer settings win unless told otherwise; either way a difference is said (fault E04)."""
    saved = OptimizerConfig(**record["config"]["optimizer"])
    if saved == config.optimizer:
        return None
    override = config.checkpoint.override_optimizer
    for name, (old, new) in changes(asdict(saved), asdict(config.optimizer)).items():
        used, other = (new, old) if override else (old, new)
        why = "checkpoint.override_optimizer is true" if override else "give --checkpoint.override_optimizer true"
        where = "checkpoint" if override else "configuration"
        notes.append(f"optimizer.{name} is {used}; the {where} says {other} ({why}{'' if override else ' to take it'})")
    return None if override else saved


def _check_changes(record: dict[str, Any], config: RunConfig, prints: Mapping[str, str]) -> list[str]:
    """A line for each change since the checkpoint; ValueError for those of model or data order, unless forced."""
    lines: list[str] = []
    wrong: list[str] = []
    split = "use_distributed_optimizer"
    if record["config"]["actor"][split] != getattr(config.actor, split):
        raise ValueError(
            f"actor.{split} is {getattr(config.actor, split)}, the checkpoint was written with the other: their "
            "optimizer states cannot be carried over; put it back as it was"
        )
    for name, (old, new) in changes(record["config"], asdict(config)).items():
        if name.startswith((*SILENT, "optimizer.")):
            continue
        lines.append(f"{name} was {old} and is {new}")
        if name in ORDER:
            wrong.append(lines[-1])
    for name, now in prints.items():
        if record["fingerprints"].get(name) != now:
            wrong.append(f"the {name} is not the one that the run began with")
    if wrong and not config.checkpoint.force:
        raise ValueError(
            f"this would be another run than the checkpoint's: {'; '.join(wrong)}. Put it back as it was, choose "
            "another train.output_dir, or give --checkpoint.force true"
        )
    return [f"changed since the checkpoint: {line}" for line in lines + [w for w in wrong if w not in lines]]


def changes(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted names of the values that differ between two nested settings: {name: (old, new)}."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in [*old, *(k for k in new if k not in old)]:
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            found |= changes(before, after, f"{prefix}{key}.")
        elif _plain(before) != _plain(after):
            found[f"{prefix}{key}"] = (before, after)
    return {k: v for k, v in found.items() if prefix or not k.startswith(SILENT)}


def _plain(value: Any) -> Any:
    """Tuples read back from a file are lists."""
    return json.loads(json.dumps(value))


def with_start(config: RunConfig, start: Start) -> RunConfig:
    """The configuration that the run goes by."""
    return config if start.optimizer is None else replace(config, optimizer=start.optimizer)


def fingerprints(model_folder: str | Path, prompts: Sequence[Prompt]) -> dict[str, str]:
    """What tells whether model and training data are those of another time.

    The data's covers every prompt's tokens and answer; the model's covers config.json and, of the weights, names,
    shapes, sizes and the first bytes of each file, so that a folder of any size takes no time.
    """
    data = hashlib.sha256()
    for prompt in prompts:
        data.update(repr((prompt.id, prompt.token_ids, prompt.answer)).encode())
    model = hashlib.sha256((Path(model_folder) / "config.json").read_bytes())
    for path in sorted(Path(model_folder).glob("*.safetensors")):
        with path.open("rb") as file:
            model.update(f"{path.name} {path.stat().st_size}".encode() + file.read(1 << 16))
    return {"model": model.hexdigest()[:16], "training data": data.hexdigest()[:16]}
