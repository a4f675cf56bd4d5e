"""Writes one step's audit and rollouts; the first rank writes the audit, every rank its own rollouts."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from d3s_megatron.actor.megatron_actor import MegatronActor
from d3s_megatron.actor.parallel import Layout
from d3s_megatron.algorithms.recipes import Recipe
from d3s_megatron.algorithms.token_selection import TopShare
from d3s_megatron.audit.files import AUDIT, ROLLOUTS, audit_file, drop_from, drop_rollouts_before, write_table
from d3s_megatron.audit.gather import STATUS_NAMES, Gathered, StepRecord, gather
from d3s_megatron.audit.pieces import Pieces, clean
from d3s_megatron.audit.reasons import reasons
from d3s_megatron.audit.rollouts import save_rollouts
from d3s_megatron.checkpointing import steps_of
from d3s_megatron.config import RunConfig
from d3s_megatron.report.log_file import json_value
from d3s_megatron.types import Experience


class Audit:
    """The audit of a run.

    Tables are made and written by a thread of their own while training goes on; a file that cannot be written is left
    out, with a line that says so.
    """

    def __init__(self, config: RunConfig, recipe: Recipe, layout: Layout, num_steps_done: int) -> None:
        """Goes on after `num_steps_done` steps: what an earlier process wrote of later ones is removed."""
        self._config, self._settings, self._recipe, self._layout = config, config.audit, recipe, layout
        self._run = Path(config.train.output_dir)
        self._first_saved = 0  # rollouts of earlier steps are gone
        self._pieces: Pieces | None = None
        self._thread = ThreadPoolExecutor(1, "audit")
        self._writing: Future[None] | None = None
        if layout.rank == 0:
            for kind in (AUDIT, ROLLOUTS):
                (self._run / kind).mkdir(parents=True, exist_ok=True)
            drop_from(self._run, num_steps_done)

    def step(self, record: StepRecord, row: Mapping[str, Any], actor: MegatronActor) -> None:
        """Writes what is due for one training step, whose log row so far is `row`; a collective over all ranks."""
        self._settle()
        step, settings = record.judged.step, self._settings
        gathered, shown = None, []
        if settings.every and (step % settings.every == 0 or step + 1 == self._config.train.steps):
            if self._wants_tokens(step):
                shown = shown_groups(record.selected, settings.num_prompts)
            gathered = gather(record, actor, self._layout, shown, updated=row["num_updates"] > 0)
        # The row of the log grows while the thread works.
        self._writing = self._thread.submit(self._write, record, dict(row), gathered, shown, self._first_needed())

    def close(self) -> None:
        """Waits for what is being written."""
        self._settle()
        self._thread.shutdown()

    def _settle(self) -> None:
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def _write(
        self, record: StepRecord, row: dict[str, Any], gathered: Gathered | None, shown: list[int], first_needed: int
    ) -> None:
        step, settings, layout = record.judged.step, self._settings, self._layout
        try:
            if settings.rollouts != "none":
                save_rollouts(self._run, step, layout.rank, layout.world_size, record.rollouts, record.verdicts)
                if first_needed > self._first_saved:
                    drop_rollouts_before(self._run, first_needed)
                    self._first_saved = first_needed
            if gathered is not None and layout.rank == 0:
                why = reasons(self._recipe, record.judged, record.selected, row["N"])
                table = step_table(record, gathered, why, self._decoder() if shown else None)
                if not (isinstance(self._recipe.tokens, TopShare) and self._recipe.tokens.by == "signal"):
                    gathered = replace(gathered, threshold=None)  # tokens were not ranked by abs(A) x H
                write_table(table, step_meta(record, gathered, why, row, shown), audit_file(self._run, step))
        except OSError as failed:
            print(f"rank {layout.rank}: no audit of step {step + 1}: {failed}", file=sys.stderr, flush=True)

    def _wants_tokens(self, step: int) -> bool:
        every = self._settings.tokens_every
        return bool(every) and (step % every == 0 or step + 1 == self._config.train.steps)

    def _first_needed(self) -> int:
        """The first step whose rollouts a kept checkpoint leads to; 0 where all are kept or another rank removes."""
        if self._settings.rollouts != "recent" or self._layout.rank:
            return 0
        kept = sorted((self._run / "checkpoints").glob("step-*"))
        return steps_of(kept[0]) if kept else 0

    def _decoder(self) -> Pieces:
        if self._pieces is None:
            from transformers import AutoTokenizer

            self._pieces = Pieces(AutoTokenizer.from_pretrained(self._config.model.path, local_files_only=True))
        return self._pieces


def shown_groups(selected: Experience, num: int) -> list[int]:
    """Groups whose tokens are shown: from the one of which most is kept to the one of which least is."""
    counts = torch.zeros(int(selected.group_ids.max()) + 1).index_add(0, selected.group_ids, selected.kept.float())
    order = counts.argsort(descending=True, stable=True).tolist()
    if num >= len(order):
        return sorted(order)
    places = [round(i * (len(order) - 1) / max(1, num - 1)) for i in range(num)]
    return sorted({order[place] for place in places})


def step_table(
    record: StepRecord, gathered: Gathered, why: tuple[list[str], Tensor], pieces: Pieces | None
) -> pa.Table:
    """One row per rollout, in uid order.

    uid, group: int32. prompt_id, status, reason: text. reward, advantage: float64; reward is null without a verdict.
    length, num_kept_tokens: tokens. mean_entropy: nats, of kept rollouts. truncated, kept: bool.
    With `pieces` also token_ids, pieces, entropy, score, token_kept: lists, null but for the shown prompts' rollouts;
    entropy, score (abs(A) x H) and token_kept only of kept ones.
    """
    judged, selected = record.judged, record.selected
    scored = ~gathered.mean_entropy.isnan().numpy()
    columns = {
        "uid": pa.array(judged.uids.int().numpy()),
        "group": pa.array(judged.group_ids.int().numpy()),
        "prompt_id": _words([clean(prompt.id) for prompt in record.prompts], judged.group_ids),
        "reward": pa.array(judged.rewards.numpy(), mask=~judged.rewards.isfinite().numpy()),
        "status": _words(STATUS_NAMES, gathered.status),
        "advantage": pa.array(selected.advantages.numpy()),
        "length": pa.array(judged.lengths.int().numpy()),
        "truncated": pa.array(judged.truncated.numpy()),
        "kept": pa.array(selected.kept.numpy()),
        "reason": _words(*why),
        "num_kept_tokens": pa.array(gathered.num_kept_tokens.int().numpy()),
        "mean_entropy": pa.array(gathered.mean_entropy.float().numpy(), mask=~scored),
    }
    if pieces is not None:
        rows = [gathered.tokens.get(uid) for uid in range(len(judged.uids))]
        texts = [row and pieces.of(row.token_ids) for row in rows]
        columns |= {
            "token_ids": pa.array([row and row.token_ids for row in rows], pa.list_(pa.int32())),
            "pieces": pa.array(texts, pa.list_(pa.string())),
            "entropy": pa.array([row and row.entropy for row in rows], pa.list_(pa.float32())),
            "score": pa.array([row and row.score for row in rows], pa.list_(pa.float32())),
            "token_kept": pa.array([row and row.kept for row in rows], pa.list_(pa.bool_())),
        }
    return pa.table(columns)


def step_meta(
    record: StepRecord, gathered: Gathered, why: tuple[list[str], Tensor], row: Mapping[str, Any], shown: list[int]
) -> dict[str, Any]:
    """The JSON record of a step: log row, score histogram (bins of files.HISTOGRAM_EDGES), threshold, checksums."""
    counts = torch.bincount(why[1], minlength=len(why[0]))
    prompts = {group: record.prompts[group] for group in shown}
    return {
        "step": record.judged.step,
        "row": {name: json_value(value) for name, value in row.items()},
        "reasons": {name: num for name, num in zip(why[0], counts.tolist(), strict=True) if num},
        "histogram": {"all": gathered.histogram[0].tolist(), "kept": gathered.histogram[1].tolist()},
        "threshold": gathered.threshold,
        "checksums": {
            "kept_tokens": gathered.kept_checksum,
            "weights": gathered.weights_checksum,
            "gradients": gathered.gradients_checksum,
        },
        "prompts": {
            str(group): {"id": clean(p.id), "text": clean(p.text), "answer": clean(p.answer)}
            for group, p in prompts.items()
        },
    }


def _words(names: Sequence[str], which: Tensor) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(which.int().numpy(), pa.array(names, pa.string()))
