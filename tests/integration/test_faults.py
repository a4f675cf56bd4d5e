"""Faults that really happen to a run: it ends, or goes on, by a stated rule, and says what it was."""

import json
import re
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from helpers import HANG_SECONDS, ROOT, own_environment
from killed_save_worker import MOMENTS
from ranks import run_ranks
from test_resume import STEPS, assert_equal, flags, rows_of, train

from d3s_megatron import stages
from d3s_megatron.actor import checkpoint
from d3s_megatron.actor.parallel import shutdown
from d3s_megatron.checkpointing import newest_whole
from d3s_megatron.report.run_log import RunLog


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    train(inputs, out)
    return out


@pytest.fixture(autouse=True)
def leave_process_group():
    """A run that ends with an exception in this process leaves its process group to be closed."""
    yield
    shutdown()


def start(argv, fault, num_processes, *options):
    """The command with a fault in it, by torchrun; the finished process."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
    env = own_environment() | {"FAULT": fault}
    command = [*launcher, *options, ROOT / "tests/integration/fault_worker.py", *argv]
    return subprocess.run(
        list(map(str, command)), env=env, cwd=ROOT, capture_output=True, text=True, timeout=HANG_SECONDS
    )


def on_step(monkeypatch, step, act):
    """Calls `act` as the log row of a step is written."""
    write = RunLog.step

    def step_then_act(self, row):
        write(self, row)
        if row["step"] == step:
            act()

    monkeypatch.setattr(RunLog, "step", step_then_act)


@pytest.mark.parametrize("ask", ["SIGTERM", "SIGUSR1", "stop"])
def test_a_run_that_is_asked_to_end_saves_and_goes_on_later(ask, inputs, whole, tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        act = (out / "stop").touch if ask == "stop" else lambda: signal.raise_signal(getattr(signal, ask))
        on_step(patch, 0, act)
        train(inputs, out)
    assert ask in capsys.readouterr().out
    assert newest_whole(out / "checkpoints")[0].name == "step-000001" and not (out / "summary.json").exists()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    train(inputs, out)
    assert_equal(whole, out)


def test_a_killed_rank_starts_again_from_the_last_checkpoint_without_a_hand(inputs, tmp_path):
    """Of two ranks one is killed in step 4; torchrun starts both again, and they resume after step 2."""
    out = tmp_path / "run"
    done = start(flags(inputs, out), "kill 1 3 update", 2, "--max-restarts", "1")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "resumed from" in done.stdout and "after step 2" in done.stdout and "exitcode: -9" in done.stderr
    assert [row["step"] for row in rows_of(out) if "progress" in row] == list(range(STEPS))
    assert (out / "summary.json").exists()


@pytest.fixture(scope="module")
def killed_saves(inputs, tmp_path_factory):
    """Runs that were killed inside the save after step 2, by the moment of it."""
    folder = tmp_path_factory.mktemp("killed")
    runs = {moment: folder / str(number) for number, moment in enumerate(MOMENTS)}
    jobs = {moment: flags(inputs, out, checkpoint__every=1, checkpoint__keep=1) for moment, out in runs.items()}
    (folder / "jobs.json").write_text(json.dumps(jobs))
    done = run_ranks(["tests/integration/killed_save_worker.py", folder / "jobs.json"])
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return runs


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_killed_at_any_moment_of_a_save_goes_on_from_the_last_whole_one(
    moment, inputs, whole, killed_saves, capsys
):
    """Fault E08: what is named was whole, what is not is said and removed, and the rest of the run is the same."""
    out = killed_saves[moment]
    done = 2 if moment in ("named, but not latest", "the older one half removed") else 1
    left = [folder.name for folder in (out / "checkpoints").glob(".writing-*")]
    assert len(left) == (moment != "named, but not latest")
    train(inputs, out)
    said = capsys.readouterr().out
    assert f"resumed from {out / 'checkpoints' / f'step-{done:06d}'}, after step {done}" in said
    assert all(f"removed {out / 'checkpoints' / name}, a save that never ended" in said for name in left)
    assert not list((out / "checkpoints").glob(".writing-*"))
    assert_equal(whole, out)


def test_ranks_without_their_launcher_end(inputs, tmp_path):
    """They would train on, and write into the folder of the run that is started in their place."""
    out = tmp_path / "run"
    done = start(flags(inputs, out), "orphan 0 1 score", 2)
    assert done.returncode == -signal.SIGKILL
    # `start` returned as both had closed their ends of its pipes. One notices; the other does too, or loses the first.
    logs = [(out / "ranks" / f"rank-{rank:05d}.log").read_text() for rank in range(2)]
    assert all(re.search(r"ended in phase \w+ of step 2", log) for log in logs)
    assert any(re.search(r"ended in phase score of step 2: its launcher, process \d+, is gone", log) for log in logs)


def test_a_rank_that_sleeps_is_named_and_the_job_ended(inputs, tmp_path):
    out = tmp_path / "run"
    argv = flags(inputs, out, watch__stall_minutes=30, watch__end_minutes=120)
    done = start(argv, "sleep 1 1 score", 2)
    assert done.returncode != 0
    assert re.search(r"no progress for \d+ s in phase score of step 2; waiting for rank 1", done.stderr)
    assert "ended by watch.end_minutes" in done.stderr
    stacks = (out / "ranks" / "rank-00001.log").read_text()
    assert "in strike" in stacks and "most recent call first" in stacks


def test_a_rank_that_raises_is_the_first_cause_on_the_screen_and_in_its_log(inputs, tmp_path):
    out = tmp_path / "run"
    done = start(flags(inputs, out), "raise 1 1 update", 2)
    assert done.returncode != 0
    root = done.stderr[done.stderr.index("Root Cause") :]
    assert re.search(r"rank\s*: 1 ", root) and "a made-up fault" in root
    assert "a made-up fault" in (out / "ranks" / "rank-00001.log").read_text()
    assert "phase update of step 2" in (out / "ranks" / "rank-00001.log").read_text()


def test_a_loss_that_is_not_finite_is_skipped_counted_and_ends_the_run_in_the_end(
    inputs, tmp_path, monkeypatch, capsys
):
    make = stages._step_tensors

    def poisoned(*args):
        tensors, has_signal = make(*args)
        for weights in tensors.weights:
            weights.fill_(float("nan"))
        return tensors, has_signal

    monkeypatch.setattr(stages, "_step_tensors", poisoned)
    with pytest.raises(FloatingPointError, match="2 in a row"):
        train(inputs, tmp_path / "run", train__max_bad_steps=2)
    steps = [row for row in rows_of(tmp_path / "run") if "progress" in row]
    assert [(row["num_updates"], row["num_bad_updates"]) for row in steps] == [(0, 1)] * 2
    assert "loss" in steps[0] and steps[0]["loss"] is None  # as null, so that the log stays JSON
    assert capsys.readouterr().out.count("the update was skipped") == 2


def test_out_of_memory_says_what_to_lower(inputs, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        torch.empty(1 << 60, dtype=torch.uint8)

    monkeypatch.setattr(stages, "score", full)
    with pytest.raises(RuntimeError) as failed:
        train(inputs, tmp_path / "run")
    (note,) = failed.value.__notes__
    assert note == (
        "out of memory in phase score of step 1: lower actor.max_logits_mb, then actor.max_tokens_per_microbatch"
    )
    assert note in (tmp_path / "run" / "ranks" / "rank-00000.log").read_text()


@pytest.fixture
def small_disk(tmp_path):
    """Mounts a file system of a given size, where the test may; unmounts it in the end."""
    mounted = []

    def mount(num_bytes):
        folder = tmp_path / "run" / "checkpoints"
        folder.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "none", folder]
        if not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("mounting a small file system is not allowed here")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", folder], check=True)


def test_a_disk_without_room_leaves_the_checkpoint_out_and_training_goes_on(
    inputs, whole, small_disk, tmp_path, capsys
):
    small_disk(100_000)
    train(inputs, tmp_path / "run")
    assert capsys.readouterr().out.count("MB free; training goes on") == 2
    assert_equal(whole, tmp_path / "run")


def test_a_disk_that_fills_during_a_save_ends_the_run_with_the_last_checkpoint_whole(
    inputs, small_disk, tmp_path, monkeypatch
):
    size = sum(file.stat().st_size for file in newest_of(inputs, tmp_path / "probe").rglob("*"))
    folder = small_disk(size + 100_000)
    monkeypatch.setattr(checkpoint, "num_bytes", lambda actor: 0)  # others fill the disk after the look at it
    with pytest.raises(OSError, match=r"was not written(.|\n)*the disk of .* has 0\.. MB free"):
        train(inputs, tmp_path / "run", checkpoint__every=1, checkpoint__keep=1)
    assert newest_whole(folder)[0].name == "step-000001"


def newest_of(inputs, out):
    train(inputs, out, train__steps=1, checkpoint__every=1)
    return newest_whole(out / "checkpoints")[0]
