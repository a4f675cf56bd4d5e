"""From a fixture of logs to the tables: every number below was computed by hand."""

import csv
import json

import pytest

from d3s_megatron.ablate.__main__ import main
from d3s_megatron.ablate.curves import panels_of
from d3s_megatron.ablate.results import Interval, over_seeds, paired, places, read_all, read_run, round_down, t_quantile

ACCURACY = {  # after 0, 2 and 4 steps, seeds 0 to 2
    "grpo": [(0.30, 0.40, 0.50), (0.32, 0.42, 0.55), (0.28, 0.38, 0.45)],
    "d3s": [(0.30, 0.45, 0.60), (0.32, 0.47, 0.60), (0.28, 0.40, 0.60)],
}
TOKENS, SECONDS = {"grpo": 100, "d3s": 20}, {"grpo": 1.0, "d3s": 0.5}  # a step


def write_run(folder, accuracy, tokens, seconds, num_steps=4):
    folder.mkdir(parents=True)
    rows = []
    for step in range(num_steps + 1):
        if step % 2 == 0:
            rows.append({"step": step, "eval/pass@1": accuracy[step // 2], "eval/pass@8": 0.9})
        if step < num_steps:
            spent = {"tokens_trained": tokens * (step + 1), "tokens_generated": 100 * (step + 1)}
            row = {"step": step, "progress": step / 3, "time/step": seconds, "time/cpu": seconds / 2, "sur": 0.7}
            rows.append(row | spent | ({"probe/kl": 0.1 * step, "probe/entropy": 1.0} if step % 3 == 0 else {}))
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "summary.json").write_text("{}")


@pytest.fixture
def logs(tmp_path):
    for name, seeds in ACCURACY.items():
        for seed, accuracy in enumerate(seeds):
            write_run(tmp_path / name / f"seed-{seed}", accuracy, TOKENS[name], SECONDS[name])
    return tmp_path


@pytest.fixture
def curves(logs):
    return read_all(logs, ("grpo", "d3s"), (0, 1, 2), "time/step")


def test_a_run_is_its_evaluations_with_what_was_spent_until_then(logs):
    curve = read_run(logs / "grpo" / "seed-0", "grpo", 0)
    assert curve.axes == {"step": (0, 2, 4), "tokens": (0, 200, 400), "seconds": (0, 2, 4)}
    assert curve.accuracy == (0.30, 0.40, 0.50)
    assert read_run(logs / "grpo" / "seed-0", "grpo", 0, "time/cpu").axes["seconds"] == (0, 1, 2)


def test_between_evaluations_it_is_on_the_line_and_beyond_the_last_one_there_is_nothing(curves):
    first = curves[0]
    assert [first.at("step", k) for k in (0, 1, 2, 3, 4)] == pytest.approx([0.30, 0.35, 0.40, 0.45, 0.50])
    assert first.at("tokens", 80) == pytest.approx(0.34) and first.at("seconds", 2.5) == pytest.approx(0.425)
    assert first.at("step", 4.1) is None and first.at("tokens", -1) is None


def test_intervals_are_students(curves):
    # 0.50, 0.55, 0.45: standard deviation 0.05; t at 0.975 with 2 degrees of freedom is 4.302653.
    found = over_seeds(curves, "grpo", "step", 4)
    assert (found.mean, found.num) == (pytest.approx(0.5), 3)
    assert found.half == pytest.approx(4.302653 * 0.05 / 3**0.5, rel=1e-6) == pytest.approx(0.124207, abs=1e-6)
    assert over_seeds(curves, "d3s", "step", 4).half == pytest.approx(0, abs=1e-12)
    assert over_seeds(curves, "d3s", "tokens", 81) is None
    # By seed 0.60 - 0.50, 0.60 - 0.55, 0.60 - 0.45.
    difference = paired(curves, "d3s", "grpo", "step", 4)
    assert (difference.mean, difference.half) == (pytest.approx(0.1), pytest.approx(0.124207, abs=1e-6))
    assert Interval.of([0.5]).num == 1 and Interval.of([0.5]).half != Interval.of([0.5]).half
    assert t_quantile(4) == pytest.approx(2.776445) and t_quantile(60) == pytest.approx(2.0003, abs=1e-3)


def test_the_tables_are_these(logs, capsys):
    call = ["--out", str(logs), "--table-only", "--at-steps", "1,4", "--at-tokens", "80,400", "--at-seconds", "2"]
    assert main(call) == 0
    text = (logs / "table.md").read_text()
    for line in (
        "| algorithm | 1 steps | 4 steps | minus grpo, by seed |",
        "| grpo | 0.350 ± 0.050 | 0.500 ± 0.124 | - |",
        "| d3s | 0.370 ± 0.069 | 0.600 ± 0.000 | +0.100 ± 0.124 |",
        "| algorithm | 80 tokens | 400 tokens |",
        "| grpo | 0.340 ± 0.050 | 0.500 ± 0.124 |",
        "| d3s | 0.600 ± 0.000 | - |",
        "| algorithm | 2 s |",
        "| grpo | 0.400 ± 0.050 |",
        "| d3s | 0.600 ± 0.000 |",
        "| grpo | 3 | 400 | 1.000 | 4.0 ± 0.0 |",
        "| d3s | 3 | 80 | 0.200 | 2.0 ± 0.0 |",
    ):
        assert line in text.splitlines(), line
    assert "0.600 ± 0.000" in capsys.readouterr().out
    rows = list(csv.DictReader((logs / "table.csv").open()))
    assert {
        "algorithm": "d3s", "measure": "accuracy_minus_grpo", "axis": "step", "at": "4", "num_seeds": "3",
        "mean": "0.100000", "low": "-0.024207", "high": "0.224207",
    } in rows  # fmt: skip
    evaluations = list(csv.DictReader((logs / "curves.csv").open()))
    assert len(evaluations) == 18 and list(evaluations[1].values()) == [
        "grpo",
        "0",
        "2",
        "200",
        "2",
        "0.400000",
        "0.900000",
    ]
    for name in ("accuracy", "sur_kl", "entropy"):
        assert (logs / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_where_to_compare_when_nothing_is_said(curves):
    assert places(curves, "step") == [1, 2, 3, 4]
    assert places(curves, "tokens") == [80, 400]  # what d3s has in the end, and grpo
    assert places(curves, "seconds") == [0.5, 1, 1.5, 2]  # d3s is done after 2
    assert [round_down(x) for x in (0, 0.0457, 9.99, 10, 12345)] == [0, 0.045, 9.9, 10, 12000]


def test_a_run_that_goes_on_counts_as_far_as_it_is_and_is_marked(logs, capsys):
    folder = logs / "d3s" / "seed-2"
    (folder / "summary.json").unlink()
    lines = (folder / "log.jsonl").read_text().splitlines()
    (folder / "log.jsonl").write_text("\n".join(lines[:5]) + "\n" + lines[5][:20])  # three steps and a bit
    assert main(["--out", str(logs), "--table-only", "--at-steps", "2,4"]) == 0
    text = (logs / "table.md").read_text()
    assert "| d3s | 0.440 ± 0.090 | - | - |" in text and "| d3s | 3, 1 not done |" in text


def test_panels_repeat_the_first_and_share_out_the_others():
    assert panels_of(["a"]) == [["a"]]
    assert panels_of(list("abcdef")) == [list("abcdef")]
    assert panels_of(list("abcdefghijk")) == [list("abcdef"), list("aghijk")]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (["--seeds", "0"], "--seeds is 0: give at least 1"),
        (["--config", "missing.yaml"], "--config is missing.yaml: give a YAML file"),
        (["--stepz", "3"], "--stepz is no option here and no --section.key"),
        (["--train.seed", "3"], "--train.seed is set for every run by"),
        (["--table-only"], "holds no runs"),
        (["--config", "CONFIG", "--algorithms", "grpo,grpo"], "each once"),
        (["--config", "CONFIG", "--start", "nowhere.py"], "--start is nowhere.py, which is no file"),
    ],
)
def test_refusals(call, message, tmp_path, capsys):
    config = tmp_path / "c.yaml"
    config.write_text("train: {steps: 2}\n")
    assert main(["--out", str(tmp_path / "out"), *(str(config) if part == "CONFIG" else part for part in call)]) == 2
    assert message in capsys.readouterr().err


def test_another_setting_in_the_same_folder_is_refused(tmp_path):
    from d3s_megatron.ablate.runs import Comparison

    config = tmp_path / "c.yaml"
    config.write_text("train: {steps: 2}\n")
    Comparison(tmp_path / "out", config, ("grpo",), (0,)).check_folder()
    Comparison(tmp_path / "out", config, ("grpo", "d3s"), (0, 1)).check_folder()  # more runs are fine
    with pytest.raises(ValueError, match="holds runs with another overrides"):
        Comparison(tmp_path / "out", config, ("grpo",), (0,), ("--train.steps", "3")).check_folder()
    config.write_text("train: {steps: 3}\n")
    with pytest.raises(ValueError, match="holds runs with another config"):
        Comparison(tmp_path / "out", config, ("grpo",), (0,)).check_folder()


def test_seeds_come_round_by_round(tmp_path):
    from d3s_megatron.ablate.runs import Comparison

    runs = Comparison(tmp_path, tmp_path / "c.yaml", ("grpo", "d3s"), (0, 1)).runs()
    assert [(run.seed, run.algorithm) for run in runs] == [(0, "grpo"), (0, "d3s"), (1, "grpo"), (1, "d3s")]
