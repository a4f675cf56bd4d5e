"""Saves the rollouts of a step as they were sampled and judged, so that it can run again without an engine.

Each rank writes its own share, so nothing is gathered: 4 bytes of log-prob and, compressed, 1 to 3 of id a token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from d3s_megatron.audit.files import META, ROLLOUTS, rollout_file, write_table
from d3s_megatron.types import FinishReason, Prompt, Request, Rollout, Verdict


def _lists(rows: Sequence[Sequence[Any]], dtype: Any) -> pa.Array:
    lengths = np.fromiter(map(len, rows), np.int32, len(rows))
    offsets = np.concatenate([np.zeros(1, np.int32), lengths.cumsum(dtype=np.int32)])
    values = np.fromiter(chain.from_iterable(rows), dtype, int(offsets[-1]))
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def save_rollouts(
    run: Path, step: int, rank: int, world_size: int, rollouts: Sequence[Rollout], verdicts: Sequence[Verdict]
) -> None:
    """Writes one rank's rollouts of a step; log-probs as float32, which is what the trainer reads.

    A prompt's tokens stand with its first rollout only.
    """
    requests = [rollout.request for rollout in rollouts]
    first = [i == 0 or r.group_id != requests[i - 1].group_id for i, r in enumerate(requests)]
    columns = {
        "uid": np.fromiter((r.uid for r in requests), np.int32, len(requests)),
        "group": np.fromiter((r.group_id for r in requests), np.int32, len(requests)),
        "prompt_id": pa.array([r.prompt.id for r in requests], pa.string()).dictionary_encode(),
        "prompt_token_ids": _lists(
            [r.prompt.token_ids if new else () for r, new in zip(requests, first, strict=True)], np.int32
        ),
        "token_ids": _lists([rollout.token_ids for rollout in rollouts], np.int32),
        "log_probs": _lists([rollout.log_probs for rollout in rollouts], np.float32),
        "truncated": pa.array([rollout.finish_reason == "length" for rollout in rollouts], pa.bool_()),
        "reward": pa.array([verdict.value for verdict in verdicts], pa.float64(), from_pandas=False),
        "status": pa.array([verdict.status for verdict in verdicts], pa.string()).dictionary_encode(),
    }
    write_table(pa.table(columns), {"step": step, "world_size": world_size}, rollout_file(run, step, rank))


def load_rollouts(run: Path, step: int, rank: int = 0, world_size: int = 1) -> tuple[list[Rollout], list[Verdict]]:
    """This rank's share of the rollouts that a run saved for a step, whatever number of ranks had saved them.

    Raises:
        ValueError: not all of them are there.
    """
    files = sorted((run / ROLLOUTS).glob(f"step-{step + 1:06d}.rank-*.arrow"))
    if not files:
        raise ValueError(f"{run}: no rollouts of step {step + 1} were saved (audit.rollouts), or they are removed")
    tables = [_read(path) for path in files]
    num_ranks = json.loads(tables[0].schema.metadata[META])["world_size"]
    if len(files) != num_ranks:
        raise ValueError(f"{run}: rollouts of step {step + 1} are there from {len(files)} of {num_ranks} ranks")
    rollouts: list[Rollout] = []
    verdicts: list[Verdict] = []
    for table in tables[rank::world_size]:
        prompts: dict[int, Prompt] = {}
        for row in table.to_pylist():
            group, ids = row["group"], row["prompt_token_ids"]
            if ids:
                prompts[group] = Prompt(row["prompt_id"], "", tuple(ids), "")
            request = Request(row["uid"], group, prompts[group], seed=0)
            finish: FinishReason = "length" if row["truncated"] else "stop"
            rollouts.append(Rollout(request, tuple(row["token_ids"]), tuple(row["log_probs"]), finish, ""))
            verdicts.append(Verdict(row["reward"], row["status"]))
    return rollouts, verdicts


def _read(path: Path) -> pa.Table:
    with pa.memory_map(str(path)) as source:  # what is not looked at is not read
        return pa.ipc.open_file(source).read_all()
