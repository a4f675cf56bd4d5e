"""The comparison's command on a tiny model: stopped, gone on with, and asked again when all is there."""

import os
import signal
import subprocess
import threading
import time

import pytest
import yaml
from builders import addition_file, tiny_model, tiny_run
from helpers import HANG_SECONDS, ROOT

from d3s_megatron.ablate.__main__ import STOPPED, main

STEPS = 4


@pytest.fixture(scope="module")
def call(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ablate")
    settings = tiny_run(tiny_model(folder / "model"), addition_file(folder / "train.jsonl"), folder / "unused", STEPS)
    settings |= {
        "train.eval_every": 2,
        "rewards.kind": "reward_functions:held",
        "train.export": "false",
        "audit.every": 0,
        "audit.rollouts": "none",
    }
    nested: dict = {}
    for key, value in settings.items():
        section, name = key.split(".")
        if name != "output_dir":
            nested.setdefault(section, {})[name] = str(value) if hasattr(value, "parts") else value
    (folder / "config.yaml").write_text(yaml.safe_dump(nested))
    arguments = ["--config", str(folder / "config.yaml"), "--algorithms", "random", "--seeds", "1"]
    return [*arguments, "--out", str(folder / "out")], folder / "out"


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """Runs are processes of their own, which need this tree and the tests' reward function."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'tests'}")


def stop_at_first_step(log):
    end = time.monotonic() + HANG_SECONDS
    while not (log.exists() and '"progress"' in log.read_text()) and time.monotonic() < end:
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_stopped_comparison_goes_on_and_a_complete_one_only_makes_tables(call, capsys, monkeypatch):
    """The run's second step waits for its rewards until the run has been told to stop."""
    arguments, out = call
    log, told = out / "random" / "seed-0" / "log.jsonl", out.parent / "told"
    monkeypatch.setenv("HELD", f"{log}{os.pathsep}{told}")
    terminate = subprocess.Popen.terminate

    def terminate_and_let_go(self):
        terminate(self)
        told.touch()

    monkeypatch.setattr(subprocess.Popen, "terminate", terminate_and_let_go)
    threading.Thread(target=stop_at_first_step, args=(log,)).start()
    assert main(arguments) == STOPPED
    assert not (out / "random" / "seed-0" / "summary.json").exists()
    assert "the same command goes on from here" in capsys.readouterr().out

    assert main(arguments) == 0
    assert "resumed from" in (out / "random" / "seed-0" / "output.txt").read_text()
    said = capsys.readouterr().out
    assert "1/1  random, seed 0" in said and "What was spent" in said
    logs = {path: path.stat().st_mtime_ns for path in out.glob("*/seed-0/log.jsonl")}

    assert main(arguments) == 0
    assert "1 of 1 runs are complete already" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in out.glob("*/seed-0/log.jsonl")} == logs and len(logs) == 1
    assert (out / "table.md").exists() and (out / "accuracy.png").exists()
