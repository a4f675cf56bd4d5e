"""The reward against real material: reported faults of answer checkers, and the golds of the seven evaluation sets.

Both lie in a folder `shared` beside the repository, which a user's machine does not have.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import HANG_SECONDS
from ranks import run_ranks

from d3s_megatron.rewards import RewardConfig, check_golds, make_reward

ROOT = Path(__file__).parents[2]
CASES = ROOT.parent / "shared" / "cases" / "verifier.jsonl"
EVAL = ROOT.parent / "shared" / "data" / "eval"
SETS = ("aime24", "aime25", "amc23", "gsm8k", "math500", "minerva", "olympiadbench")
# The verdicts of these are policy, and ours is not the one noted with the case (POLICY.md, names and constants).
OUR_POLICY = {"V131": False}

needs_cases = pytest.mark.skipif(
    not CASES.exists(), reason=f"no file {CASES.name} in a shared folder beside the project"
)
needs_sets = pytest.mark.skipif(not EVAL.exists(), reason="no evaluation sets in a shared folder beside the project")


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def reward():
    with make_reward(RewardConfig(deadline_seconds=HANG_SECONDS)) as reward:
        yield reward


@needs_cases
def test_every_reported_case(tmp_path):
    rows = read(CASES)
    command = [
        sys.executable,
        "-m",
        "d3s_megatron.rewards",
        "--file",
        str(CASES),
        "--deadline-seconds",
        str(HANG_SECONDS),
    ]
    result = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    graded = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["id"] for row in graded] == [row["id"] for row in rows]
    expected = {row["id"]: OUR_POLICY.get(row["id"], row["expected"]) for row in rows}
    assert {row["id"]: row["value"] == 1.0 for row in graded} == expected
    assert {row["status"] for row in graded} == {"right", "wrong", "no_answer"}  # none had to be killed
    assert list(tmp_path.iterdir()) == []


@needs_sets
@pytest.mark.parametrize("name", SETS)
def test_golds_equal_themselves_and_not_their_neighbours(reward, name):
    golds = [(row["id"], str(row["answer"])) for row in read(EVAL / f"{name}.jsonl")]
    assert check_golds(golds) == []
    own = reward.grade([(rf"So \boxed{{{gold}}}.", gold) for _, gold in golds])
    assert [id for (id, _), verdict in zip(golds, own, strict=True) if verdict.value != 1.0] == []
    neighbours = [(a, b) for a, b in zip(golds, golds[1:], strict=False) if a[1] != b[1]]
    others = reward.grade([(rf"So \boxed{{{b}}}.", a) for (_, a), (_, b) in neighbours])
    same = [(a, b) for ((_, a), (_, b)), verdict in zip(neighbours, others, strict=True) if verdict.value != 0.0]
    assert same == ([("5", "x=5")] if name == "math500" else [])  # which are the same answer


TORCHRUN = r"""
import os
import torch.distributed as dist
from d3s_megatron.rewards import RewardConfig, make_reward

dist.init_process_group("gloo")
rank = dist.get_rank()
with make_reward(RewardConfig(num_workers=1, deadline_seconds=1200.0)) as reward:
    items = [(rf"\boxed{{{k}}}", str(k if k % 2 else rank)) for k in range(2, 40)]
    values = [verdict.value for verdict in reward.grade(items)]
gathered = [None, None]
dist.all_gather_object(gathered, values)
assert gathered[0] == gathered[1] == [float(k % 2) for k in range(2, 40)], gathered
dist.destroy_process_group()
"""


def test_every_rank_has_its_own_workers(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(TORCHRUN)
    result = run_ranks([script], 2)
    assert result.returncode == 0, result.stderr[-2000:]
