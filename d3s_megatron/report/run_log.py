"""The log of a run: one JSON line and one table row a step, and TensorBoard. Only the first rank writes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter

from d3s_megatron.report.log_file import LOG_FILE, json_value
from d3s_megatron.report.trackers import Trackers

# (heading, width, format of a row of the log)
COLUMNS = (
    ("step", 5, lambda r: f"{r['step'] + 1}"),
    ("reward", 7, lambda r: f"{r['reward']:.3f}"),
    ("kept", 11, lambda r: f"{r['num_kept']}/{r['num_rollouts']}"),
    ("tokens", 11, lambda r: f"{r['num_kept_tokens']}/{r['num_scored_tokens']}"),
    ("entropy", 8, lambda r: f"{r['entropy']:.3f}"),
    ("KL", 8, lambda r: f"{r['kl']:.4f}" if "kl" in r else "-"),
    ("SUR", 5, lambda r: f"{r['sur']:.2f}"),
    ("grad", 7, lambda r: f"{r['grad_norm']:.3f}" if "grad_norm" in r else "skip"),
    ("rollout", 8, lambda r: f"{r['time/rollout']:.2f}"),
    ("reward s", 9, lambda r: f"{r['time/reward']:.2f}"),
    ("score", 6, lambda r: f"{r['time/score']:.2f}"),
    ("update", 7, lambda r: f"{r['time/update']:.2f}"),
    ("sync", 6, lambda r: f"{r['time/sync']:.2f}"),
    ("s/step", 7, lambda r: f"{r['time/step']:.2f}"),
)
HEADING_EVERY = 25


class StageClock:
    """Wall seconds of each stage of one step: `with clock("rollout"): ...`."""

    def __init__(self, entered: Callable[[str], None] = lambda stage: None) -> None:
        """`entered` is told the name of each stage as it begins."""
        self._entered = entered
        self._start = time.perf_counter()
        self._cpu_start = time.process_time()
        self._stages: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        self._entered(stage)
        start = time.perf_counter()
        yield
        self._stages[stage] = self._stages.get(stage, 0.0) + time.perf_counter() - start

    @contextmanager
    def apart(self, name: str) -> Iterator[None]:
        """As a stage, but its seconds are no part of the step's: for what only looks at the training."""
        cpu = time.process_time()
        with self(name):
            yield
        self._start += self._stages[name]
        self._cpu_start += time.process_time() - cpu

    def as_row(self) -> dict[str, float]:
        """time/STAGE in seconds, time/step since the clock was made, and time/cpu: this process's processor seconds."""
        row = {f"time/{stage}": seconds for stage, seconds in self._stages.items()}
        row["time/step"] = time.perf_counter() - self._start
        return row | {"time/cpu": time.process_time() - self._cpu_start}


class RunLog:
    """Writes `log.jsonl`, TensorBoard files under `tensorboard/`, and a table on the terminal.

    A number that is not finite becomes null in the JSON lines, so that every line is valid JSON.
    """

    def __init__(
        self,
        folder: Path,
        is_main: bool,
        num_steps_done: int = 0,
        keep_last_evaluation: bool = True,
        trackers: Trackers | None = None,
    ) -> None:
        """Goes on after `num_steps_done` training steps: what an earlier process logged past them is removed.

        `keep_last_evaluation` is False where the evaluation after that very step is still to come.
        """
        self._main, self._trackers = is_main, trackers
        self._rows = 0
        if is_main:
            path = folder / LOG_FILE
            if path.exists():
                drop_later_rows(path, num_steps_done, keep_last_evaluation)
            self._file = path.open("a", encoding="utf-8")
            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=num_steps_done or None)

    def step(self, row: Mapping[str, Any]) -> None:
        """One training step."""
        if not self._main:
            return
        if self._rows % HEADING_EVERY == 0:
            print(" ".join(f"{heading:>{width}}" for heading, width, _ in COLUMNS), flush=True)
        self._rows += 1
        print(" ".join(f"{text(row):>{width}}" for _, width, text in COLUMNS), flush=True)
        self._write(row)

    def event(self, row: Mapping[str, Any], message: str) -> None:
        """Something that is no training step: an evaluation, a skipped update."""
        if self._main:
            print(message, flush=True)
            self._write(row)

    def message(self, text: str) -> None:
        """A line for people only."""
        if self._main:
            print(text, flush=True)

    def _write(self, row: Mapping[str, Any]) -> None:
        self._file.write(json.dumps({k: json_value(v) for k, v in row.items()}) + "\n")
        self._file.flush()
        values = [
            Summary.Value(tag=name, simple_value=value)
            for name, value in row.items()
            if isinstance(value, (int, float)) and name != "step"
        ]
        # One event for all of a row.
        self._board.file_writer.add_summary(  # type: ignore[attr-defined]  # torch declares what it sets as None
            Summary(value=values), row["step"]
        )
        if self._trackers:
            self._trackers.log(row, row["step"] + ("progress" in row))  # steps done, as an evaluation says it

    def close(self) -> None:
        """Flushes what is open."""
        if self._main:
            self._file.close()
            self._board.close()
        if self._trackers:
            self._trackers.close()


def drop_later_rows(path: Path, num_steps_done: int, keep_last_evaluation: bool = True) -> None:
    """Keeps the rows of the first `num_steps_done` training steps, and evaluations up to there.

    A last line that was cut short goes too.
    """
    last = num_steps_done if keep_last_evaluation and num_steps_done else num_steps_done - 1
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            break
        # A training step says which it was, from 0; an evaluation after how many it was.
        if row["step"] <= (num_steps_done - 1 if "progress" in row else last):
            kept.append(line + "\n")
    beside = path.with_name(f".{path.name}.new")
    beside.write_text("".join(kept), encoding="utf-8")
    beside.replace(path)
