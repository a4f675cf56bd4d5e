"""The probe on real runs of the command: it changes nothing, its norms obey the propositions, layouts agree."""

import json

import pytest
import torch
from builders import tiny_run
from ranks import run_ranks
from safetensors.torch import load_file

from d3s_megatron.train import main

PROBE = ("--probe.every", "2", "--probe.responses", "16", "--train.steps", "4")


def flags(inputs, out, *extra):
    settings = tiny_run(*inputs, out, 4)
    return [part for key, value in settings.items() for part in (f"--{key}", str(value))] + list(extra)


def steps_of(out):
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [row for row in rows if "reward" in row]


@pytest.fixture(scope="module")
def probed(inputs, tmp_path_factory):
    out = tmp_path_factory.mktemp("probed") / "run"
    main(flags(inputs, out, *PROBE))
    return out


def test_the_first_every_second_and_the_last_step_are_probed_apart_from_the_steps_time(probed):
    rows = steps_of(probed)
    assert ["probe/entropy" in row for row in rows] == [True, False, True, True]
    for row in rows:
        inside = sum(
            v for k, v in row.items() if k.startswith("time/") and k not in ("time/step", "time/cpu", "time/probe")
        )
        assert inside <= row["time/step"] and row["time/cpu"] >= 0
    assert rows[0]["probe/kl"] == pytest.approx(0, abs=1e-9) and rows[-1]["probe/kl"] > 0


def test_the_norms_stay_below_the_propositions_bounds_and_lemma_1_holds(probed):
    rows = [row for row in steps_of(probed) if "probe/gamma" in row and row["sur_all"]]
    assert len(rows) == 2
    for row in rows:
        # Every response gave its own gradient, so gamma is the largest of them and the bounds are theorems.
        assert 0 < row["probe/grad_norm_all"] <= row["probe/bound_all"] == pytest.approx(4 * row["probe/gamma"])
        assert 0 < row["probe/grad_norm_kept"] <= row["probe/bound_kept"]
        assert row["probe/lemma_1_groups"] > 0 and row["probe/lemma_1_failures"] == 0


def test_a_run_learns_the_same_with_and_without_a_probe(inputs, probed, tmp_path):
    main(flags(inputs, tmp_path / "run", "--train.steps", "4"))
    plain, watched = steps_of(tmp_path / "run"), steps_of(probed)
    assert [(r["loss"], r["grad_norm"], r["kl"]) for r in plain] == [
        (r["loss"], r["grad_norm"], r["kl"]) for r in watched
    ]
    a, b = (load_file(out / "export" / "model.safetensors") for out in (tmp_path / "run", probed))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_grpo_keeps_everything_so_both_norms_are_one_and_that_of_the_update(inputs, tmp_path):
    main(
        flags(
            inputs,
            tmp_path / "run",
            *PROBE,
            "--algorithm.name",
            "grpo",
            "--algorithm.kl_beta",
            "0",
            "--algorithm.loss_normalization",
            "seq_mean_full",
        )  # fmt: skip
    )
    for row in filter(lambda row: "probe/gamma" in row, steps_of(tmp_path / "run")):
        assert row["probe/grad_norm_kept"] == row["probe/grad_norm_all"]
        assert row["probe/grad_norm_all"] == pytest.approx(row["grad_norm"], rel=1e-4)
        assert row["probe/entropy"] == pytest.approx(row["entropy"], rel=1e-6)
        assert "kl" not in row and "probe/kl" in row


def test_two_data_parallel_ranks_measure_what_one_does(inputs, probed, tmp_path):
    done = run_ranks(["-m", "d3s_megatron.train", *flags(inputs, tmp_path / "run", *PROBE)], num_processes=2)
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = steps_of(probed)[0], steps_of(tmp_path / "run")[0]
    for name in (key for key in one if key.startswith("probe/")):
        assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-7), name
