"""What several tests check or start: packing invariants, and programs under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

from d3s_megatron.launch import PLACE
from d3s_megatron.types import Sample, TokenBatch

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"
HANG_SECONDS = 1200  # what waits longer than this hangs, on a machine ten times slower and with others on it too


def context(row: TokenBatch, position: int) -> list[tuple[int, int]]:
    """(token, position) of all that the token at a position of the row may attend to, itself last."""
    borders = row.cu_seqlens.tolist()
    segment = bisect_right(borders, position) - 1
    before = row.prefix[segment].item()
    assert before < segment
    seen = [] if before < 0 else context(row, borders[before + 1] - 1)
    own = slice(borders[segment], position + 1)
    return seen + list(zip(row.token_ids[own].tolist(), row.position_ids[own].tolist(), strict=True))


def check_packing(
    samples: Sequence[Sample],
    rows: Sequence[TokenBatch],
    max_tokens: int,
    multiple_of: int = 1,
    sample_multiple: int = 1,
) -> None:
    """Asserts the invariants that stand at the top of actor/packing.py, for rows in which every token is scored."""
    seen: list[int] = []
    index = 0  # of the samples' first response token
    starts = []
    for sample in samples:
        starts.append(index)
        index += len(sample.response_ids)
    for row in rows:
        assert len(row.token_ids) % multiple_of == 0
        borders = row.cu_seqlens.tolist()
        assert borders[0] == 0 and borders[-1] == len(row.token_ids) == len(row.position_ids)
        assert borders == sorted(set(borders)) and len(row.prefix) == len(borders) - 1
        assert all(border % sample_multiple == 0 for border in borders)
        if len(row.samples) > 1:
            assert len(row.token_ids) <= max_tokens + multiple_of - 1
        for order, which in enumerate(row.samples):
            seen.append(which)
            sample, mine = samples[which], row.sequence == order
            assert row.targets[mine].tolist() == list(sample.response_ids)
            assert row.token_index[mine].tolist() == list(range(starts[which], starts[which] + len(mine[mine])))
            whole = list(enumerate(sample.prompt_ids + sample.response_ids))
            for t, position in enumerate(row.rows[mine].tolist()):
                expected = [(token, at) for at, token in whole[: len(sample.prompt_ids) + t]]
                assert context(row, position) == expected
    assert sorted(seen) == list(range(len(samples)))


def own_environment() -> dict[str, str]:
    """For a process started from here: one thread, this tree, and not this process's place in a world of its own."""
    env = {name: value for name, value in os.environ.items() if name not in PLACE}
    return env | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}


def run_python(args: Sequence[str], num_processes: int = 1) -> subprocess.CompletedProcess[str]:
    """`python ARGS`, or `torchrun --nproc-per-node NUM ARGS` on a free port; output as text.

    Where torchrun is not what is tested, `ranks.run_ranks` does the same seconds faster.
    """
    launcher = [sys.executable]
    if num_processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
    command = [*launcher, *map(str, args)]
    return subprocess.run(
        command, env=own_environment(), cwd=ROOT, capture_output=True, text=True, timeout=HANG_SECONDS
    )
