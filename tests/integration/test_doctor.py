"""The doctor finds and names the faults that are put in, and says nothing of a layout that is right."""

import pytest
import torch
from ranks import run_ranks

from d3s_megatron.doctor.__main__ import main
from d3s_megatron.doctor.compare import beyond, compare, likely_cause
from d3s_megatron.doctor.faults import FAULTS
from d3s_megatron.doctor.layouts import parse_layout, parse_settings
from d3s_megatron.doctor.parity import SMALL_ROWS, launch, report, run_jobs
from d3s_megatron.doctor.plain import plain_update
from d3s_megatron.doctor.tiny import tiny_model
from d3s_megatron.doctor.update import Job

TOLERANCE = 1e-4
# Each fault, the layout in which it shows, what differs first and the words of the diagnosis.
SHOWN = {
    "plain-all-reduce": ("tp2", "grad norm", "no backward"),
    "per-rank-count": ("dp2", "loss", "token count of all ranks"),
    "padded-columns": ("single", "log-probs", "padded vocabulary columns"),
    "rolled-labels": ("single", "log-probs", "packed border"),
    "context-sum": ("cp2", "grad norm", "every gradient is 2 times"),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """By (fault or "none", layout), and what transformers says of the single process without a fault."""
    folder = tmp_path_factory.mktemp("doctor")
    model = str(tiny_model(folder / "model"))
    jobs = {}
    for fault in [None, *FAULTS]:
        for name, size in (("single", 1), ("tp2", 2), ("dp2", 2), ("cp2", 2)):
            if fault is None or SHOWN[fault][0] == name:
                actor = {} if name == "single" else SMALL_ROWS | parse_layout(name).actor
                job = Job(model, str(folder / f"{fault}.{name}.pt"), actor, fault=fault)
                jobs[f"{fault or 'none'}/{name}"] = (size, job)
    found = run_jobs(jobs, folder, run_ranks)
    return found | {"plain": plain_update(model, found["none/single"], torch.device("cpu"))}


def test_a_right_layout_agrees_with_the_single_process_and_that_with_transformers(outcomes, capsys):
    single = outcomes["none/single"]
    pairs = [(name, outcomes[f"none/{name}"], single, "single process") for name in ("tp2", "dp2", "cp2")]
    assert report([*pairs, ("single", single, outcomes["plain"], "transformers")], TOLERANCE)
    assert "WRONG" not in capsys.readouterr().out


@pytest.mark.parametrize("fault", SHOWN)
def test_a_fault_is_found_and_named(fault, outcomes, capsys):
    layout, first, words = SHOWN[fault]
    got = outcomes[f"{fault}/{layout}"]
    want = outcomes["plain" if layout == "single" else "none/single"]
    wrong = beyond(compare(got, want), TOLERANCE)
    assert wrong[0].stage == first
    assert words in likely_cause(wrong)
    assert not report([(layout, got, want, "")], TOLERANCE)
    said = capsys.readouterr().out
    assert "WRONG" in said and f"first that differs: {first}, by" in said


def test_the_gradients_of_a_plain_all_reduce_are_named(outcomes):
    wrong = beyond(compare(outcomes["plain-all-reduce/tp2"], outcomes["none/single"]), TOLERANCE)
    assert {"model.embed_tokens.weight", "model.norm.weight"} <= {difference.name for difference in wrong}
    assert not {"log-probs", "entropy", "kept tokens", "loss"} & {difference.stage for difference in wrong}


@pytest.mark.parametrize("name", ["", "tp", "tp2tp2", "xp2", "tp2,pp2", "sp2"])
def test_a_layout_that_is_no_layout_is_refused(name):
    with pytest.raises(ValueError, match="not understood"):
        parse_layout(name)


def test_settings_of_the_actor_are_read_and_those_that_cannot_be_are_refused_in_one_line(capsys):
    assert parse_settings(["layers=torch", "gather_rows=false", "num_layers_in_first_pipeline_stage=3"]) == {
        "layers": "torch",
        "gather_rows": False,
        "num_layers_in_first_pipeline_stage": 3,
    }
    for wrong, words in (
        ("layer=torch", "names are"),
        ("gather_rows=2", "of its kind"),
        ("layers", "NAME=VALUE"),
        ("use_distributed_optimizer=true", "leave it out"),
    ):
        assert main(["parity", "--layouts", "tp1", "--actor", wrong]) == 2
        assert words in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert main(["parity", "--layouts", "tp1", "--actor", "layers=transformer_engine"]) == 2
        assert "actor.layers is transformer_engine, but" in capsys.readouterr().err


def test_a_model_that_does_not_fit_a_layout_is_refused_in_one_line(capsys):
    assert main(["parity", "--layouts", "pp3"]) == 2
    assert "4 layers do not divide" in capsys.readouterr().err


def test_layouts_are_launched_as_ranks_of_one_world(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text("import os, sys; print(os.environ['RANK'], os.environ['WORLD_SIZE'], sys.argv[1])")
    done = launch([str(script), "jobs"], 2)
    assert done.returncode == 0 and sorted(done.stdout.splitlines()) == ["0 2 jobs", "1 2 jobs"], done.stderr


def test_env_names_versions_and_the_first_conflict(capsys, monkeypatch):
    from d3s_megatron.doctor import environment

    main(["env"])
    said = capsys.readouterr().out
    assert "megatron-core" in said and "ops backend" in said
    monkeypatch.setattr(environment, "version", lambda package: None if package == "psutil" else "1000.0")
    assert main(["env"]) == 1
    assert "remedy:   pip install" in capsys.readouterr().out
