"""Damaged sources, full disks and killed runs: a clear error each, the source untouched, nothing half-written."""

import hashlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import HANG_SECONDS
from ranks import run_ranks
from safetensors.torch import load_file
from unit.convert.builders import counting_state, tiny_config, write_folder

from d3s_megatron.convert import read_shape
from d3s_megatron.convert.checkpoint import describe, job, jobs, moves
from d3s_megatron.convert.checkpoint.torch_dist import DistCheckpoint
from d3s_megatron.convert.hf_folder import INDEX

ROOT = Path(__file__).parents[2]


def fingerprint(folder):
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def source(tmp_path):
    config = tiny_config()
    return write_folder(tmp_path / "source", config, counting_state(read_shape(config)))


@pytest.fixture
def megatron(tmp_path, source):
    job.run(jobs.import_job(source, tmp_path / "megatron", tp=2, pp=2))
    return tmp_path / "megatron"


@pytest.fixture
def run_tool(monkeypatch, capsys):
    """The command line in this process: (exit status, standard output, standard error)."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    tool = importlib.import_module("checkpoint")

    def run(*arguments):
        status = tool.main([str(argument) for argument in arguments])
        return status, *capsys.readouterr()

    return run


def test_truncated_weights(tmp_path, source, run_tool):
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    before = fingerprint(source)
    status, _, errors = run_tool("import", source, tmp_path / "out")
    assert status == 2 and "model.safetensors" in errors and "damaged" in errors
    assert not (tmp_path / "out").exists() and fingerprint(source) == before


def test_missing_shard_and_wrong_index(tmp_path, megatron):
    job.run(jobs.export_job(megatron, tmp_path / "hf", max_shard_bytes=2048))
    index = json.loads((tmp_path / "hf" / INDEX).read_text())
    shard = tmp_path / "hf" / index["weight_map"]["model.norm.weight"]
    moved = shard.rename(tmp_path / "away")
    with pytest.raises(ValueError, match=f"{shard.name}.*missing shard"):
        jobs.import_job(tmp_path / "hf", tmp_path / "out")
    moved.rename(shard)
    index["weight_map"]["model.norm.weight"] = index["weight_map"]["model.embed_tokens.weight"]
    (tmp_path / "hf" / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match="model.norm.weight lies in"):
        jobs.import_job(tmp_path / "hf", tmp_path / "out")


def test_damaged_megatron_checkpoints(tmp_path, megatron):
    cases = {
        "truncated": lambda folder: os.truncate(folder / "__3_0.distcp", 700),
        "missing file": lambda folder: (folder / "__3_0.distcp").unlink(),
        "damaged": lambda folder: os.truncate(folder / ".metadata", 100),
        "no complete torch_dist checkpoint": lambda folder: (folder / "metadata.json").unlink(),
        "no hf/config.json": lambda folder: shutil.rmtree(folder / "hf"),
    }
    for i, (words, damage) in enumerate(cases.items()):
        folder = shutil.copytree(megatron, tmp_path / f"copy{i}")
        damage(folder)
        with pytest.raises(ValueError, match=words.replace("/", ".")):
            jobs.export_job(folder, tmp_path / "out")
    (tmp_path / "copy0" / "__3_0.distcp").write_bytes(bytes((megatron / "__3_0.distcp").stat().st_size))
    with pytest.raises(ValueError, match="no tensor at byte"):
        jobs.export_job(tmp_path / "copy0", tmp_path / "out")


def test_config_of_another_model(megatron):
    config = json.loads((megatron / "hf" / "config.json").read_text())
    for changes, words in (
        ({"num_hidden_layers": 1}, "config.json says"),
        ({"tie_word_embeddings": True}, "does not have: output_layer.weight"),
        ({"intermediate_size": 16}, "config.json says"),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "linear_qkv.bias"),
    ):
        shape = read_shape({**config, **changes})
        with pytest.raises(ValueError, match=words):
            DistCheckpoint(megatron).blocks(shape)


def test_metadata_that_would_run_code_is_refused(tmp_path, megatron):
    (megatron / ".metadata").write_bytes(b"cos\nsystem\n(S'touch %s'\ntR." % str(tmp_path / "ran").encode())
    with pytest.raises(ValueError, match="names os.system"):
        DistCheckpoint(megatron)
    assert not (tmp_path / "ran").exists()


def test_plan_refuses_a_full_disk_or_memory_in_advance(source):
    plan = describe.plan_conversion(source)
    plan.check()
    with pytest.raises(ValueError, match="the disk has 10 B free"):
        type(plan)(**{**vars(plan), "free_disk": 10}).check()
    with pytest.raises(ValueError, match="fewer workers"):
        type(plan)(**{**vars(plan), "free_memory": 10}).check()


def test_full_disk_leaves_nothing_behind(tmp_path, source, run_tool):
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", small], capture_output=True)
    if mounted.returncode:
        pytest.skip("a small tmpfs cannot be mounted here: it needs privileges")
    try:
        before = fingerprint(source)
        with pytest.raises(ValueError, match="the disk is full"):
            job.run(jobs.import_job(source, small / "out"))
        assert list(small.iterdir()) == [] and fingerprint(source) == before
        status, _, errors = run_tool("import", source, small / "out")
        assert status == 2 and "make room" in errors
    finally:
        subprocess.run(["umount", small], check=True)


def test_wrong_folders_are_told_apart(tmp_path, source, megatron, run_tool):
    for arguments, words in (
        (("import", tmp_path / "nowhere", tmp_path / "out"), "no folder"),
        (("export", tmp_path / "nowhere", tmp_path / "out"), "no folder"),
        (("import", megatron, tmp_path / "out"), "is a Megatron checkpoint: use export"),
        (("export", source, tmp_path / "out"), "is a Hugging Face folder: use import"),
        (("import", source, source / "out"), "choose another folder"),
        (("export", megatron, megatron / "hf" / "out"), "choose another folder"),
    ):
        status, _, errors = run_tool(*arguments)
        assert status == 2 and words in errors
    assert not (tmp_path / "out").exists() and not (source / "out").exists()


def test_existing_target_and_foreign_leftovers_are_refused(tmp_path, source, megatron):
    with pytest.raises(ValueError, match="exists"):
        job.run(jobs.import_job(source, megatron))
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "something").touch()
    with pytest.raises(ValueError, match="another source or other options"):
        job.run(jobs.import_job(source, tmp_path / "out"))


def test_stopped_run_continues_where_it_stopped(tmp_path, source, monkeypatch):
    monkeypatch.setattr(job, "SYNC_BYTES", 1)  # a journal entry for every task
    planned = jobs.import_job(source, tmp_path / "out", tp=2)
    ran, run_task = [], moves.run_task

    def stop_in_the_middle(task, *files):
        if len(ran) == len(planned.tasks) // 2:
            raise KeyboardInterrupt
        ran.append(task)
        run_task(task, *files)

    monkeypatch.setattr(job, "run_task", stop_in_the_middle)
    with pytest.raises(KeyboardInterrupt):
        job.run(planned)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="other options"):
        job.run(jobs.import_job(source, tmp_path / "out", tp=1))
    for file in (tmp_path / ".out.partial").glob("*.distcp"):  # no journal vouches for headers: gone after a power cut
        with open(file, "r+b") as opened:
            opened.write(bytes(64))
    again = []
    monkeypatch.setattr(job, "run_task", lambda task, *files: (again.append(task), run_task(task, *files)))
    report = job.run(jobs.import_job(source, tmp_path / "out", tp=2))
    assert len(ran) + len(again) == len(planned.tasks) and report.continued_nbytes == sum(t.nbytes for t in ran)
    job.run(jobs.import_job(source, tmp_path / "whole", tp=2))
    for path in (tmp_path / "whole").glob("*.distcp"):
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()


def test_space_of_a_stopped_run_is_not_asked_for_twice(tmp_path, source, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(describe.shutil, "disk_usage", lambda path: usage)  # others write to this disk too
    free = describe.plan_conversion(source, tmp_path / "out").free_disk
    reserved = job.partial_folder(tmp_path / "out")
    reserved.mkdir()
    (reserved / "file").write_bytes(bytes(64 * 2**20))
    after = describe.plan_conversion(source, tmp_path / "out").free_disk
    assert after - free == 64 * 2**20


def test_killed_process_continues(tmp_path, run_tool):
    config = tiny_config(hidden_size=512, intermediate_size=2048, num_hidden_layers=24, torch_dtype="bfloat16")
    shape = read_shape(config)
    source = write_folder(tmp_path / "source", config, counting_state(shape, torch.bfloat16))
    command = [sys.executable, "tools/checkpoint.py", "import", source, tmp_path / "out", "--tp", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    running = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + HANG_SECONDS
    while not (tmp_path / ".out.partial").exists() and running.poll() is None and time.monotonic() < deadline:
        time.sleep(0.001)
    running.send_signal(signal.SIGKILL)
    running.wait()
    if (tmp_path / "out").exists():
        pytest.skip("the conversion ended before it could be killed")
    status, _, errors = run_tool("import", source, tmp_path / "out", "--tp", "2")
    assert status == 0, errors
    status, output, _ = run_tool("verify", source, tmp_path / "out")
    assert status == 0 and "equal bit for bit" in output


def test_source_that_changes_meanwhile_is_noticed(tmp_path, source, monkeypatch):
    planned = jobs.import_job(source, tmp_path / "out")
    run_task = moves.run_task

    def touch(task, *files):
        run_task(task, *files)
        os.utime(source / "model.safetensors")

    monkeypatch.setattr(job, "run_task", touch)
    with pytest.raises(ValueError, match="source file changed"):
        job.run(planned)
    assert not (tmp_path / "out").exists()


def test_tool_says_what_it_did(tmp_path, source, run_tool):
    status, output, _ = run_tool("import", source, tmp_path / "out", "--tp", "2", "--workers", "2")
    assert status == 0 and "GB/s" in output and "peak anonymous memory" in output
    assert run_tool("export", tmp_path / "out", tmp_path / "back")[0] == 0
    assert run_tool("verify", source, tmp_path / "back")[0] == 0
    assert "qwen2: 2 layers" in run_tool("inspect", tmp_path / "out")[1]
    assert "import: reads" in run_tool("plan", source, "--tp", "2")[1]
    state = load_file(tmp_path / "back" / "model.safetensors")
    state["model.norm.weight"][0] += 1
    other = write_folder(tmp_path / "other", json.loads((source / "config.json").read_text()), state)
    status, output, _ = run_tool("verify", other, tmp_path / "out")
    assert status == 1 and "model.norm.weight: values differ" in output


def test_help_shows_every_command():
    done = run_ranks(["tools/checkpoint.py", "--help"])
    assert done.returncode == 0
    assert all(f"checkpoint.py {name}" in done.stdout for name in ("import", "export", "verify", "plan", "inspect"))
