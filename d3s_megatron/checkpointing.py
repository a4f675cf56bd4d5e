"""Checkpoints of a run: when to write one, which to keep, and which to go on from.

    OUTPUT_DIR/checkpoints/step-000040/   whole: it got this name, in one rename, after its last byte was written
    OUTPUT_DIR/checkpoints/latest         the newest whole one's name, for people and scripts
    OUTPUT_DIR/checkpoints/.writing-...   on its way; removed at the next start

A folder's `run.json` lists its files with their sizes, so that a damaged one is found out and the one before it taken.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from d3s_megatron.actor import checkpoint
from d3s_megatron.actor.megatron_actor import MegatronActor
from d3s_megatron.actor.parallel import Layout, world_reduce
from d3s_megatron.config import RunConfig
from d3s_megatron.convert import save_hf_folder
from d3s_megatron.convert.checkpoint.jobs import put_companions
from d3s_megatron.report.run_log import RunLog

MANIFEST = "run.json"
LATEST = "latest"
WRITING = ".writing-"


@dataclass(frozen=True)
class Progress:
    """How far a run has come."""

    step: int = 0  # training steps done
    totals: Mapping[str, int] | None = None  # counters of the training loop, by name
    seconds: float = 0.0  # of training
    schedule: Mapping[str, float] = field(default_factory=dict)  # the state of the schedule of N and rho
    lengths: str = ""  # of earlier answers, by which prompts are shared out (rollout/spread.py)


def root_of(config: RunConfig) -> Path:
    """Where a run keeps its checkpoints."""
    return Path(config.train.output_dir) / "checkpoints"


def why_broken(folder: Path) -> str | None:
    """What is wrong with a checkpoint folder, or None where every file is there in its full length."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError) as wrong:
        return f"its {MANIFEST} cannot be read ({wrong})"
    for name, size in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes of {size}"
    return None


def steps_of(folder: Path) -> int:
    """The training steps after which a checkpoint folder was saved."""
    return int(folder.name.removeprefix("step-"))


def newest_whole(root: Path, at_most: int | None = None) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint below `root`, and a line for each newer one that is damaged.

    `at_most` leaves those of more training steps out.
    """
    passed_over: list[str] = []
    for folder in sorted(root.glob("step-*"), reverse=True):
        if at_most is not None and steps_of(folder) > at_most:
            continue
        reason = why_broken(folder)
        if reason is None:
            return folder, passed_over
        passed_over.append(f"checkpoint {folder} is damaged and passed over: {reason}")
    return None, passed_over


def unfinished(root: Path) -> list[Path]:
    """Folders of saves that never ended."""
    return sorted(root.glob(f"{WRITING}*"))


class Checkpoints:
    """Writes the checkpoints of a run; every method is a collective over all ranks."""

    def __init__(self, config: RunConfig, prints: Mapping[str, str], layout: Layout, log: RunLog) -> None:
        """`prints` are fingerprints of model and data, kept so that a resume can tell whether they are the same."""
        self.config, self.settings = config, config.checkpoint
        self._prints, self._layout, self._log = dict(prints), layout, log
        self._root = root_of(config)
        self._pending: tuple[checkpoint.Save, Path, Progress] | None = None
        self._num_saves = 0
        if layout.rank == 0:
            for folder in unfinished(self._root):
                log.message(f"removed {folder}, a save that never ended")
                shutil.rmtree(folder)

    def after_step(self, actor: MegatronActor, progress: Progress, is_last: bool) -> None:
        """Saves where one is due: every `every` steps, and at the end of a run that is as long as that."""
        settings, step = self.settings, progress.step
        if self._pending and self._pending[0].is_done():
            self._complete()
        if not settings.every:
            return
        if step % settings.every == 0 or (is_last and step > settings.every):
            self.save(actor, progress)

    def save(self, actor: MegatronActor, progress: Progress, must: bool = False) -> None:
        """Writes a checkpoint, in the background where the configuration says so; OSError where it cannot.

        Without room on the disk it is left out, with a line that says so, or, where it `must`, an OSError.
        """
        self.close()
        target = self._root / f"step-{progress.step:06d}"
        if not self._agree(not target.exists()):
            return  # saved already, at the same step
        beside = self._root / f"{WRITING}{target.name}-{self._from_first(os.getpid())}"
        if self._layout.rank == 0:
            beside.mkdir(parents=True)
        dist.barrier()
        lacking = self._lacking(actor)
        if lacking:
            if self._layout.rank == 0:
                beside.rmdir()
            if must:
                raise OSError(f"no room for checkpoint {target}: {lacking}")
            self._log.message(f"  no checkpoint after step {progress.step}: {lacking}; training goes on")
            return
        self._pending = (checkpoint.begin_save(actor, beside, progress.step), target, progress)
        if not (self.settings.background and not must):
            self._complete()
        self._num_saves += 1
        if self.settings.export_every and self._num_saves % self.settings.export_every == 0:
            self._export(actor, Path(self.config.train.output_dir) / "exports" / target.name)

    def close(self) -> None:
        """Waits for a save in the background and completes it."""
        if self._pending:
            self._complete()

    def _complete(self) -> None:
        assert self._pending is not None
        (save, target, progress), self._pending = self._pending, None
        try:
            save.finish()
        except OSError as failed:
            there = self._root.exists()
            state = f"has {shutil.disk_usage(self._root).free / 1e6:.1f} MB free" if there else "is gone"
            # megatron-core 0.19 does not pass the writer's cause on: a full disk, or one that is gone, is seen here.
            raise OSError(f"{failed}; the disk of {self._root} {state}") from failed
        if self._layout.rank == 0:
            beside = next(self._root.glob(f"{WRITING}{target.name}-*"))
            put_companions(self.config.model.path, beside, getattr(torch, self.config.actor.dtype))
            self._write_manifest(beside, progress)
            os.rename(beside, target)
            _sync(self._root)
            _replace(self._root / LATEST, target.name + "\n")
            self._retain()
            self._log.message(f"  checkpoint {target}")
        dist.barrier()

    def _write_manifest(self, folder: Path, progress: Progress) -> None:
        paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        files = {str(path.relative_to(folder)): path.stat().st_size for path in paths}
        for name in files:
            _sync(folder / name)
        record = {
            **asdict(progress),
            "world_size": self._layout.world_size,
            "fingerprints": self._prints,
            "config": asdict(self.config),
            "files": files,
        }
        _replace(folder / MANIFEST, json.dumps(record, indent=1) + "\n")

    def _retain(self) -> None:
        """Removes the oldest whole checkpoints beyond `keep`; damaged ones go too, once newer whole ones exist."""
        whole = [folder for folder in sorted(self._root.glob("step-*")) if why_broken(folder) is None]
        for folder in sorted(self._root.glob("step-*")):
            if folder < whole[-self.settings.keep :][0]:
                # Renamed first: a removal that is cut short leaves nothing that looks like a checkpoint.
                doomed = folder.with_name(f"{WRITING}removal-{folder.name}")
                os.rename(folder, doomed)
                shutil.rmtree(doomed)

    def _export(self, actor: MegatronActor, folder: Path) -> None:
        if self._layout.rank == 0 and not folder.exists():
            save_hf_folder(folder, actor.shape, actor.weights(), self.config.model.path)
        else:
            for _ in actor.weights():
                pass

    def _lacking(self, actor: MegatronActor) -> str:
        """What the disk lacks for one more checkpoint, in words; empty where there is room."""
        need = checkpoint.num_bytes(actor)
        free = self._from_first(shutil.disk_usage(self._root).free)
        if need <= free:
            return ""
        return f"it takes {need / 1e6:.1f} MB, the disk of {self._root} has {free / 1e6:.1f} MB free"

    def _from_first(self, value: int) -> int:
        tensor = torch.tensor([value if self._layout.rank == 0 else 0], dtype=torch.int64)
        return int(world_reduce(self._layout)(tensor, "sum"))

    def _agree(self, holds: bool) -> bool:
        return bool(self._from_first(int(holds)))


def _sync(path: Path) -> None:
    """Brings a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _replace(path: Path, text: str) -> None:
    """Writes a file that is there as a whole or not at all."""
    beside = path.with_name(f".{path.name}.new")
    with beside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
