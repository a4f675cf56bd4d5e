"""The arithmetic task: right sums, a clean split, the same files for the same seed."""

import subprocess
import sys

from d3s_megatron.data import DataConfig, load_problems
from d3s_megatron.data.arithmetic import arithmetic_problems, write_arithmetic


def test_every_pair_once_and_every_sum_right():
    train, held_out = arithmetic_problems(seed=0)
    assert (len(train), len(held_out)) == (9_000, 1_000)
    assert len({p.problem for p in train + held_out}) == 10_000
    for p in train + held_out:
        left, right = p.problem.removesuffix("=").split("+")
        assert (len(p.problem), len(p.answer)) == (6, 3) and int(left) + int(right) == int(p.answer)


def test_the_seed_makes_the_split():
    assert arithmetic_problems(0) == arithmetic_problems(0)
    assert arithmetic_problems(0)[1] != arithmetic_problems(1)[1]


def test_the_command_writes_what_the_loader_reads(tmp_path):
    command = [sys.executable, "-m", "d3s_megatron.data.arithmetic", "--out", str(tmp_path / "a"), "--seed", "5"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert printed == [str(tmp_path / "a" / name) for name in ("train.jsonl", "eval.jsonl")]
    assert tuple(load_problems(path, DataConfig()) for path in printed) == arithmetic_problems(5)
    again = write_arithmetic(tmp_path / "b", seed=5)
    assert [path.read_bytes() for path in again] == [(tmp_path / "a" / path.name).read_bytes() for path in again]
