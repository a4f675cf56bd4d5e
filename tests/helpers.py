"""What several tests check or start: packing invariants, and programs under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from d3s_megatron.types import Sample, TokenBatch

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"


def check_packing(samples: Sequence[Sample], rows: Sequence[TokenBatch], max_tokens: int, multiple_of: int = 1) -> None:
    """Asserts the invariants that stand at the top of actor/packing.py, for rows in which every token is scored."""
    seen: list[int] = []
    for row in rows:
        assert len(row.token_ids) % multiple_of == 0
        borders = row.cu_seqlens.tolist()
        assert borders[0] == 0 and borders[-1] == len(row.token_ids) == len(row.position_ids)
        if len(row.samples) > 1:
            assert len(row.token_ids) <= max_tokens + multiple_of - 1
        for order, index in enumerate(row.samples):
            seen.append(index)
            sample, start, end = samples[index], borders[order], borders[order + 1]
            tokens = list(sample.prompt_ids + sample.response_ids)[:-1]
            assert row.token_ids[start:end].tolist() == tokens
            assert row.position_ids[start:end].tolist() == list(range(len(tokens)))
            mine = row.sequence == order
            assert row.targets[mine].tolist() == list(sample.response_ids)
            assert row.rows[mine].tolist() == [
                start + len(sample.prompt_ids) - 1 + t for t in range(len(sample.response_ids))
            ]
    assert sorted(seen) == list(range(len(samples)))


def run_python(args: Sequence[str], num_processes: int = 1, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """`python ARGS`, or `torchrun --nproc-per-node NUM ARGS` on a free port; output as text."""
    launcher = [sys.executable]
    if num_processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(name, None)
    return subprocess.run(
        [*launcher, *map(str, args)], env=env, cwd=ROOT, capture_output=True, text=True, timeout=timeout
    )
