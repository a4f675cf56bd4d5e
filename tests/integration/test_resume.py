"""A run that was cut and went on equals one that was not: weights, numbers and choices, bit for bit on the CPU."""

import json
import shutil

import pytest
import torch
from builders import addition_file, tiny_model, tiny_run
from ranks import run_ranks
from safetensors.torch import load_file

from d3s_megatron.build import preflight
from d3s_megatron.checkpointing import newest_whole
from d3s_megatron.config import parse_config
from d3s_megatron.convert.checkpoint import job, jobs
from d3s_megatron.resume import find_start, with_start
from d3s_megatron.train import main

STEPS = 4


def flags(inputs, out, **changes):
    model, data = inputs
    settings = tiny_run(model, data, out, STEPS) | {"optimizer.lr_schedule": "linear", "checkpoint.every": 2}
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
    done = run_ranks(["tests/integration/resume_worker.py", folder / "jobs.json"], num_processes)
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


def test_a_triggered_schedule_goes_on_from_its_saved_state(inputs, tmp_path):
    """What it has climbed so far lies in the checkpoint; a fresh state would start at the first N again."""
    trigger = {"algorithm__schedule": "reward", "algorithm__schedule_stages": 3, "algorithm__schedule_window": 1}
    train(inputs, tmp_path / "whole", **trigger)
    state = json.loads((tmp_path / "whole" / "checkpoints" / "step-000002" / "run.json").read_text())["schedule"]
    assert state["stage"] > 0
    out = cut(tmp_path / "whole", tmp_path / "run", step=2)
    train(inputs, out, **trigger)
    assert_equal(tmp_path / "whole", out)
    assert [row["N"] for row in rows_of(out) if "progress" in row][2] == 2 + state["stage"]


TP2 = {"actor__tensor_model_parallel_size": 2}
PP2 = {"actor__pipeline_model_parallel_size": 2}
CP2 = {"actor__context_parallel_size": 2}
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
        job("cp2", whole, checkpoint__every=1, **CP2),
    ]
    drawn, said = launch(two, root / "two", 2)
    launch([job("tp2-pp2", root / "split", **TP2, **PP2, **DISTRIBUTED)], root / "four", 4)
    return root, drawn, said


def test_with_the_distributed_optimizer_over_two_ranks_too(layouts):
    root, _, _ = layouts
    assert_equal(root / "split", root / "split-again")


@pytest.mark.parametrize("layout", ["tp2", "pp2", "dp2", "cp2"])
def test_one_rank_goes_on_as_two(layout, whole, layouts):
    assert_close(whole, layouts[0] / layout)


def test_two_context_parallel_ranks_go_on_as_one(inputs, whole, layouts, tmp_path):
    """Through both: saved by one rank, then by two that share every sequence, and by one again."""
    out = cut(layouts[0] / "cp2", tmp_path / "run", step=3)
    train(inputs, out)
    assert_close(whole, out)


def test_two_ranks_with_split_moments_go_on_as_four_of_another_layout(layouts):
    root, _, _ = layouts
    assert_close(root / "split", root / "tp2-pp2")
    assert newest_whole(root / "tp2-pp2" / "checkpoints")[0].name == "step-000004"  # four ranks saved


def test_each_rank_gets_its_own_random_state_back(layouts):
    """Fault E05."""
    (first, _, *others), (second, again, *_) = layouts[1]
    assert first != second and again == second and layouts[1][0][1] == first
    assert len({first, *others}) == 1 + len(others)  # another number of ranks keeps what it had


def start_of(inputs, out, **changes):
    """What the command would start from, without starting it."""
    config = parse_config(flags(inputs, out, **changes))
    return config, find_start(config, preflight(config).prints)


def test_a_run_that_is_complete_says_so_and_a_longer_one_goes_on(inputs, whole, tmp_path, capsys):
    """Fault E02."""
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    for steps in (STEPS, STEPS - 1):
        with pytest.raises(SystemExit, match="2"):
            train(inputs, out, train__steps=steps)
        assert "nothing left to train" in capsys.readouterr().err
    train(inputs, out, train__steps=STEPS + 1)
    assert "changed since the checkpoint: train.steps was 4 and is 5" in capsys.readouterr().out
    assert [row["step"] for row in rows_of(out) if "progress" in row] == list(range(STEPS + 1))
    assert json.loads((out / "summary.json").read_text())["steps"] == STEPS + 1


def test_a_checkpoint_in_the_background_is_the_same_and_only_the_newest_are_kept(inputs, whole, tmp_path):
    out = tmp_path / "run"
    changes = {"checkpoint__every": 1, "checkpoint__keep": 2}
    train(inputs, out, checkpoint__background="true", checkpoint__export_every=2, **changes)
    assert_equal(whole, out)
    assert [f.name for f in sorted((out / "checkpoints").glob("step-*"))] == ["step-000003", "step-000004"]
    assert (out / "checkpoints" / "latest").read_text() == "step-000004\n"
    exported = load_file(out / "exports" / "step-000004" / "model.safetensors")
    assert all(torch.equal(exported[name], weight) for name, weight in weights_of(out).items())
    job.run(jobs.export_job(out / "checkpoints" / "step-000004", tmp_path / "converted"), 1)  # from itself alone
    converted = tmp_path / "converted"
    assert all(torch.equal(load_file(converted / "model.safetensors")[name], w) for name, w in exported.items())
    assert {p.name for p in converted.iterdir()} == {p.name for p in (out / "exports" / "step-000004").iterdir()}
    again = cut(out, tmp_path / "again", step=3)
    train(inputs, again, **changes)
    assert_equal(whole, again)


def test_damaged_checkpoints_are_passed_over_and_named(inputs, whole, tmp_path):
    """Fault E08."""
    out = cut(whole, tmp_path / "run", step=STEPS)
    largest = max((out / "checkpoints" / "step-000004").iterdir(), key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    _, start = start_of(inputs, out)
    assert start.progress.step == 2
    assert any("step-000004 is damaged" in note and largest.name in note for note in start.notes)
    (out / "checkpoints" / "step-000002" / "run.json").write_text("{")
    with pytest.raises(ValueError, match="is whole: .*has .* bytes of .*; .*cannot be read"):
        start_of(inputs, out)


def test_settings_of_the_optimizer_come_from_the_checkpoint_unless_overridden(inputs, whole, tmp_path):
    """Fault E04."""
    out = cut(whole, tmp_path / "run", step=2)
    config, start = start_of(inputs, out, optimizer__lr=2e-3)
    assert with_start(config, start).optimizer.lr == 1e-3
    assert any(note.startswith("optimizer.lr is 0.001; the configuration says 0.002") for note in start.notes)
    config, start = start_of(inputs, out, optimizer__lr=2e-3, checkpoint__override_optimizer="true")
    assert with_start(config, start).optimizer.lr == 2e-3
    assert any(note.startswith("optimizer.lr is 0.002; the checkpoint says 0.001") for note in start.notes)
    train(inputs, out, optimizer__lr=2e-3, checkpoint__override_optimizer="true")
    assert [row["lr"] for row in rows_of(out) if "progress" in row] == pytest.approx([1e-3, 7.5e-4, 1e-3, 5e-4])


def test_another_order_or_model_is_refused_unless_forced_and_other_changes_are_listed(inputs, whole, tmp_path):
    out = cut(whole, tmp_path / "run", step=2)
    other = addition_file(tmp_path / "train.jsonl", num=11), tiny_model(tmp_path / "model", seed=1)
    for changes, what in [
        ({"train__seed": 1}, "train.seed was 0 and is 1"),
        ({"train__prompts_per_step": 2}, "train.prompts_per_step was 4 and is 2"),
        ({"data__train_path": other[0]}, "the training data is not the one"),
        ({"model__path": other[1]}, "the model is not the one"),
    ]:
        with pytest.raises(ValueError, match=what):
            start_of(inputs, out, **changes)
        _, start = start_of(inputs, out, checkpoint__force="true", **changes)
        assert any(what in note for note in start.notes)
    with pytest.raises(
        ValueError, match="use_distributed_optimizer is True, the checkpoint was written with the other"
    ):
        start_of(inputs, out, **DISTRIBUTED)
    _, start = start_of(inputs, out, algorithm__kl_beta=0.5, train__output_dir=out)
    assert [note for note in start.notes if "changed" in note] == [
        "changed since the checkpoint: algorithm.kl_beta was None and is 0.5"
    ]


def test_what_is_resumed_from_and_what_is_refused(inputs, whole, tmp_path, monkeypatch):
    out = cut(whole, tmp_path / "run", step=2)
    with pytest.raises(ValueError, match="holds an earlier run"):
        start_of(inputs, out, checkpoint__resume="never")
    for named in (whole, whole / "checkpoints", whole / "checkpoints" / "latest"):
        _, start = start_of(inputs, tmp_path / "new", checkpoint__resume=named, train__steps=9)
        assert start.folder == whole / "checkpoints" / "step-000004"
    with pytest.raises(ValueError, match="no whole checkpoint"):
        start_of(inputs, tmp_path / "new", checkpoint__resume=tmp_path / "nothing")
    overwrite = {"train__overwrite": "true"}
    assert start_of(inputs, out, **overwrite)[1].folder is None
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # a restart goes on; only the first start wipes
    assert start_of(inputs, out, **overwrite)[1].progress.step == 2


def test_a_run_that_was_cut_before_its_first_checkpoint_starts_again(inputs, whole, tmp_path):
    out = cut(whole, tmp_path / "run", step=0)
    _, start = start_of(inputs, out, train__output_dir=out)
    assert start.folder is None and "starts again" in start.notes[0]
    with pytest.raises(ValueError, match="holds an earlier run"):
        start_of(inputs, out, train__seed=3)
    train(inputs, out)
    assert_equal(whole, out)
