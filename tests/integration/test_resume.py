"""A run that was cut and went on equals one that was not: weights, numbers and choices, bit for bit on the CPU."""

import json
import shutil

import pytest
import torch
from builders import addition_file, tiny_model
from helpers import run_python
from safetensors.torch import load_file

from d3s_megatron.train import main

STEPS = 4


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    return tiny_model(folder / "model"), addition_file(folder / "train.jsonl")


def flags(inputs, out, **changes):
    model, data = inputs
    settings = {
        "model.path": model,
        "data.train_path": data,
        "data.eval_path": data,
        "data.prompt_template": "raw",
        "data.max_prompt_tokens": 16,
        "rollout.max_new_tokens": 6,
        "rewards.kind": "reward_functions:even_length",
        "rewards.num_workers": 1,
        "algorithm.samples_per_prompt": 4,
        "algorithm.truncated": "judge",
        "algorithm.kept_per_prompt_init": 2,
        "algorithm.kept_per_prompt_final": 4,
        "optimizer.lr": 1e-3,
        "optimizer.lr_schedule": "linear",
        "train.steps": STEPS,
        "train.prompts_per_step": 4,
        "train.eval_samples": 2,
        "train.output_dir": out,
        "checkpoint.every": 2,
    }
    settings |= {name.replace("__", "."): value for name, value in changes.items()}
    return [part for key, value in settings.items() for part in (f"--{key}", str(value))]


def train(inputs, out, num_processes=1, **changes):
    """Runs the command to its end; returns what it printed."""
    if num_processes == 1:
        main(flags(inputs, out, **changes))
        return ""
    done = run_python(["-m", "d3s_megatron.train", *flags(inputs, out, **changes)], num_processes)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def rows_of(out):
    """The log without what differs between two equal runs: times."""
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


def weights_of(out):
    return load_file(out / "export" / "model.safetensors")


def cut(run, out, step):
    """A copy of a finished run as a kill in the step after `step` would have left it."""
    shutil.copytree(run, out)
    shutil.rmtree(out / "export")
    (out / "summary.json").unlink()
    for folder in (out / "checkpoints").glob("step-*"):
        if int(folder.name.removeprefix("step-")) > step:
            shutil.rmtree(folder)
    (out / "checkpoints" / f".writing-step-{step + 2:06d}-1").mkdir()
    lines = (out / "log.jsonl").read_text().splitlines(keepends=True)
    (out / "log.jsonl").write_text("".join(lines[:-1]) + lines[-1][: len(lines[-1]) // 2])
    return out


def assert_equal(run, other):
    assert rows_of(other) == rows_of(run)
    one, two = weights_of(run), weights_of(other)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    train(inputs, out)
    return out


def test_a_cut_run_goes_on_as_if_it_had_not_been_cut(inputs, whole, tmp_path, capsys):
    """Faults E01, E02, E07, E11, G04: prompts, steps, weights, moments and the engine's weights are those of before."""
    out = cut(whole, tmp_path / "run", step=2)
    train(inputs, out)
    said = capsys.readouterr().out
    assert f"resumed from {out / 'checkpoints' / 'step-000002'}, after step 2" in said
    assert "never ended" in said and not list((out / "checkpoints").glob(".writing*"))
    assert_equal(whole, out)
    assert [row["step"] for row in rows_of(out) if "progress" in row] == list(range(STEPS))
