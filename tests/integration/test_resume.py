"""A run that was cut and went on equals one that was not: weights, numbers and choices, bit for bit on the CPU."""

import json
import shutil

import pytest
import torch
from builders import addition_file, tiny_model
from helpers import run_python
from safetensors.torch import load_file

from d3s_megatron.checkpointing import newest_whole
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


def train(inputs, out, **changes):
    main(flags(inputs, out, **changes))


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


def assert_close(run, other):
    """Equal choices, and weights within 1e-5."""
    chosen = [[row[k] for k in ("step", "num_kept", "num_kept_tokens") if k in row] for row in rows_of(run)]
    assert chosen == [[row[k] for k in ("step", "num_kept", "num_kept_tokens") if k in row] for row in rows_of(other)]
    one, two = weights_of(run), weights_of(other)
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=0, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


def launch(jobs, folder, num_processes):
    """Runs jobs in one start of the processes; [rank][job] -> the next random number, and what was printed."""
    folder.mkdir()
    (folder / "jobs.json").write_text(json.dumps(jobs))
    done = run_python(["tests/integration/resume_worker.py", folder / "jobs.json"], num_processes)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_processes)], done.stdout


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


TP2 = {"actor__tensor_model_parallel_size": 2}
PP2 = {"actor__pipeline_model_parallel_size": 2}
DISTRIBUTED = {"actor__use_distributed_optimizer": "true"}


@pytest.fixture(scope="module")
def layouts(inputs, whole, tmp_path_factory):
    """The cut run of one rank goes on at two; a run of two ranks with the distributed optimizer is cut, goes on as it
    was, and at four ranks of another layout."""
    root = tmp_path_factory.mktemp("layouts")

    def job(name, run=None, **changes):
        return {"argv": flags(inputs, root / name, **changes), "cut": run and {"run": str(run), "step": 2}}

    two = [
        job("split", **DISTRIBUTED),
        job("split-again", root / "split", **DISTRIBUTED),
        job("tp2", whole, **TP2),
        job("pp2", whole, **PP2),
        job("dp2", whole),
    ]
    drawn, said = launch(two, root / "two", 2)
    launch([job("tp2-pp2", root / "split", **TP2, **PP2, **DISTRIBUTED)], root / "four", 4)
    return root, drawn, said


def test_with_the_distributed_optimizer_over_two_ranks_too(layouts):
    root, _, _ = layouts
    assert_equal(root / "split", root / "split-again")


@pytest.mark.parametrize("layout", ["tp2", "pp2", "dp2"])
def test_one_rank_goes_on_as_two(layout, whole, layouts):
    assert_close(whole, layouts[0] / layout)


def test_two_ranks_with_split_moments_go_on_as_four_of_another_layout(layouts):
    root, _, _ = layouts
    assert_close(root / "split", root / "tp2-pp2")
    assert newest_whole(root / "tp2-pp2" / "checkpoints")[0].name == "step-000004"  # four ranks saved


def test_each_rank_gets_its_own_random_state_back(layouts):
    """Fault E05."""
    (first, _, *others), (second, again, *_) = layouts[1]
    assert first != second and again == second and layouts[1][0][1] == first
    assert len({first, *others}) == 4  # another number of ranks keeps what it had
