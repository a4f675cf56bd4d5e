"""The evaluation command: the same bytes however it is run, stopped and started; grading without a model."""

import csv
import json
import re
import signal
from pathlib import Path

import pytest
from builders import addition_file, tiny_model
from ranks import run_ranks

from d3s_megatron.evaluate.__main__ import main

SETTINGS = {
    "--sets": "add",
    "--samples": "32",
    "--prompt-template": "raw",
    "--max-new-tokens": "40",
    "--reward": "reward_functions:even_length",
    "--num-workers": "1",
    "--deadline-seconds": "1200",
    "--chunk-size": "8",
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    addition_file(folder / "add.jsonl", 5)
    addition_file(folder / "gsm8k.jsonl", 3)
    return ["--model", str(tiny_model(folder / "model")), "--data", str(folder)]


def flags(inputs, out, **changes):
    settings = SETTINGS | {f"--{name.replace('_', '-')}": str(value) for name, value in changes.items()}
    return [*inputs, "--out", str(out), *(part for pair in settings.items() for part in pair)]


def everything(folder):
    """Every file below a folder with its bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory):
    """One process that nothing stopped."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert main(flags(inputs, out)) == 0
    return out


def test_what_is_written(whole, inputs):
    assert set(everything(whole)) == {
        *("settings.json", "add.json", "summary.csv", "report.md"),
        *("generations/add.jsonl", "graded/add.jsonl"),
    }
    generations, verdicts = rows(whole / "generations" / "add.jsonl"), rows(whole / "graded" / "add.jsonl")
    assert [(r["id"], r["sample"]) for r in generations] == [(f"add-{p}", s) for p in range(5) for s in range(32)]
    assert [(r["id"], r["sample"]) for r in verdicts] == [(r["id"], r["sample"]) for r in generations]
    for row, verdict in zip(generations, verdicts, strict=True):
        assert verdict["value"] == (len(row["text"]) % 2 == 0)
        assert len(row["text"]) <= row["num_tokens"] <= 40  # a token a character; special ones are not in the text
        assert (row["num_tokens"] == 40) >= (row["finish"] == "length")
    found = json.loads((whole / "add.json").read_text())
    assert found["num_problems"] == 5 and found["num_samples"] == 32
    assert found["statuses"]["right"] == sum(verdict["value"] for verdict in verdicts)
    assert found["pass@k"]["1"]["value"] == pytest.approx(found["statuses"]["right"] / 160)
    assert list(found["pass@k"]) == ["1", "8", "16", "32"] and list(found["maj@k"]) == ["8", "16", "32"]
    assert found["cut_share"] == sum(row["finish"] == "length" for row in generations) / 160
    (line,) = csv.DictReader((whole / "summary.csv").open())
    assert float(line["pass@8"]) == found["pass@k"]["8"]["value"]
    report = (whole / "report.md").read_text()
    assert "| Qwen2.5-Math-7B, GRPO+D3S | 20.3 / 48.2 |" in report
    name = "/".join(Path(inputs[1]).parts[-2:])
    assert report.count(f"| **{name}, here** |  |  |") == 1  # none of the paper's sets was asked


KILLED = """
import os, signal, sys
from d3s_megatron.evaluate.__main__ import main
from d3s_megatron.evaluate.generations import Generations

write = Generations.write_chunk

def write_then_die(self, number, rows):
    write(self, number, rows)
    if len(list(self.parts.glob("*.jsonl"))) == 3:
        os.kill(os.getpid(), signal.SIGKILL)

Generations.write_chunk = write_then_die
main(sys.argv[1:])
"""


def test_a_killed_run_goes_on_with_other_processes_and_gives_the_same_bytes(whole, inputs, tmp_path):
    out = tmp_path / "out"
    (tmp_path / "killed.py").write_text(KILLED)
    assert run_ranks([tmp_path / "killed.py", *flags(inputs, out)]).returncode == -signal.SIGKILL
    parts = out / "generations" / "add.parts"
    before = {path.name: path.read_bytes() for path in parts.glob("*.jsonl")}
    assert len(before) == 3
    assert all(len(text.splitlines()) == 8 and text.endswith(b"\n") for text in before.values())

    done = run_ranks(["-m", "d3s_megatron.evaluate", *flags(inputs, out)], num_processes=2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{8 * len(before)} answers are there, {160 - 8 * len(before)} to generate" in done.stdout
    assert everything(out) == everything(whole)


def test_grading_again_needs_no_model_and_gives_the_same_bytes(whole, tmp_path):
    assert main(["--regrade", str(whole), "--out", str(tmp_path / "again"), "--num-workers", "1"]) == 0
    again = everything(tmp_path / "again")
    assert again == {name: text for name, text in everything(whole).items() if name in again}
    assert set(again) == {"add.json", "summary.csv", "report.md", "graded/add.jsonl"}
    assert main(["--regrade", str(whole), "--out", str(tmp_path / "few"), "--samples", "8"]) == 0
    assert json.loads((tmp_path / "few" / "add.json").read_text())["num_samples"] == 8


def test_more_samples_and_more_sets_keep_the_answers_that_are_there(inputs, tmp_path):
    out = tmp_path / "out"
    first = {"samples": 3, "limit": 2, "max_new_tokens": 9}
    assert main(flags(inputs, out, **first)) == 0
    before = rows(out / "generations" / "add.jsonl")
    assert main(flags(inputs, out, **(first | {"samples": 5, "limit": 4, "sets": "gsm8k,add"}))) == 0
    after = rows(out / "generations" / "add.jsonl")
    assert [(r["id"], r["sample"]) for r in after] == [(f"add-{p}", s) for p in range(4) for s in range(5)]
    assert [r for r in after if r["id"] in ("add-0", "add-1") and r["sample"] < 3] == before
    assert len(rows(out / "generations" / "gsm8k.jsonl")) == 15
    report = (out / "report.md").read_text()
    before = everything(out)
    assert main(["--regrade", str(out)]) == 0
    assert everything(out) == before
    assert "gsm8k: 3 of its 1319 problems were asked." in report and "| average |" in report


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "with seed 0, now 1"),
        ({"temperature": 0}, "with temperature 1.0, now 0.0"),
        ({"samples": 8}, "sample 8 of problem add-0, and --samples is 8"),
        ({"limit": 2}, "problem add-2, which is not asked now"),
        ({"prompt_template": "{problem}="}, "with prompt_template 'raw', now"),
        ({"max_new_tokens": 254}, "give at most 252"),
        ({"k": 64}, "--k names 64, and there are 32 samples"),
        ({"sets": "nosuch"}, "sets there: add, gsm8k"),
        ({"prompt_template": "chat"}, "--prompt-template is 'chat', but the tokenizer has no chat template"),
        ({"chunk_size": 0}, "--chunk-size is 0"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(whole, inputs, capsys, changes, message):
    before = everything(whole)
    assert main(flags(inputs, whole, **changes)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error
    assert everything(whole) == before


def test_a_changed_model_or_data_file_is_refused_and_overwrite_begins_anew(inputs, tmp_path, capsys):
    data, out, small = tmp_path / "data", tmp_path / "out", {"samples": 1, "max_new_tokens": 3}
    data.mkdir()
    model = tiny_model(tmp_path / "model")
    addition_file(data / "add.jsonl", 2)
    given = ["--model", str(model), "--data", str(data)]
    assert main(flags(given, out, **small)) == 0
    addition_file(data / "add.jsonl", 1)
    assert main(flags(given, out, **small)) == 2
    assert "problem add-1, which is not asked now" in capsys.readouterr().err
    changed = [{"id": f"add-{i}", "problem": "7+7=", "answer": "14"} for i in range(2)]
    (data / "add.jsonl").write_text("".join(json.dumps(row) + "\n" for row in changed))
    assert main(flags(given, out, **small)) == 2
    assert "problem add-0 with another prompt or gold than now" in capsys.readouterr().err
    tiny_model(tmp_path / "model", seed=1)
    assert main(flags(given, out, **small)) == 2
    assert "generated with fingerprint" in capsys.readouterr().err
    assert main([*flags(given, out, **small), "--overwrite"]) == 0
    assert rows(out / "generations" / "add.jsonl")[0]["gold"] == "14"


def generation(id, sample, gold, text, num_tokens=10, finish="stop"):
    return {"id": id, "sample": sample, "gold": gold, "num_tokens": num_tokens, "finish": finish, "text": text}


REPLAY = [
    generation("half", 0, r"\frac{1}{2}", r"So \boxed{0.5}."),
    generation("half", 1, r"\frac{1}{2}", r"\boxed{\frac{2}{4}}", 20),
    generation("half", 2, r"\frac{1}{2}", r"\boxed{2}"),
    generation("half", 3, r"\frac{1}{2}", "0.5, I think", 30, "length"),
    generation("seven", 0, "7", r"\boxed{9^{9^{9^{9}}}}"),
    generation("seven", 1, "7", r"\boxed{8}"),
    generation("seven", 2, "7", r"\boxed{8}"),
    generation("seven", 3, "7", r"\boxed{6} no, \boxed{7}"),
    generation("never", 0, "~", r"\boxed{7}"),
    generation("never", 1, "~", ""),
    generation("never", 2, "~", r"\boxed{~}"),
    generation("never", 3, "~", r"\boxed{7}", 40, "length"),
]


def replay(folder, lines, k="1,2,4"):
    (folder / "generations").mkdir(parents=True)
    (folder / "generations" / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    return main(["--regrade", str(folder), "--k", k, "--num-workers", "2", "--deadline-seconds", "1200"])


def test_a_replay_with_known_counts(tmp_path, capsys):
    assert replay(tmp_path / "replay", REPLAY) == 0
    found = json.loads((tmp_path / "replay" / "mine.json").read_text())
    counts = {name: num for name, num in found["statuses"].items() if num}
    assert counts == {"right": 3, "wrong": 4, "no_answer": 1, "unparsable_gold": 4}
    # Two of four, one of four and none of four are right.
    assert {k: v["value"] for k, v in found["pass@k"].items()} == pytest.approx(
        {"1": (2 / 4 + 1 / 4) / 3, "2": (5 / 6 + 3 / 6) / 3, "4": 2 / 3}
    )
    # Of two: 1/2 against 2 is a tie that 1/2 wins, so only (2, silent) loses; 7 has but (7) and no tie.
    assert {k: v["value"] for k, v in found["maj@k"].items()} == pytest.approx({"2": (5 / 6 + 0) / 3, "4": 1 / 3})
    assert found["mean_length"] == pytest.approx((8 * 10 + 20 + 30 + 40 + 10) / 12)
    assert found["cut_share"] == pytest.approx(2 / 12)
    screen = capsys.readouterr().out
    assert "mine" in screen and "25.0 [0.0, 50.0]" in screen
    before = everything(tmp_path / "replay")
    assert main(["--regrade", str(tmp_path / "replay"), "--k", "1,2,4", "--num-workers", "1"]) == 0
    assert everything(tmp_path / "replay") == before


def test_a_replay_of_a_real_models_answers(tmp_path):
    """SmolLM2-135M-Instruct on 20 GSM8K problems (tools/evaluate_smollm2.py); the ends of all were read by eye."""
    lines = rows(Path(__file__).with_name("smollm2_gsm8k.jsonl"))
    assert replay(tmp_path / "as_it_is", lines, k="1,2") == 0
    found = json.loads((tmp_path / "as_it_is" / "mine.json").read_text())
    assert {name: num for name, num in found["statuses"].items() if num} == {"wrong": 24, "no_answer": 16}
    assert found["cut_share"] == 11 / 40 and found["pass@k"]["2"]["value"] == 0
    # Two problems got the same wrong answer twice, and one a wrong answer beside none. Were these answers the golds:
    golds = {"gsm8k-test-0011": "216", "gsm8k-test-0018": "12.0", "gsm8k-test-0008": "64"}
    lines = [line | {"gold": golds.get(line["id"], line["gold"])} for line in lines]
    assert replay(tmp_path / "other_golds", lines, k="1,2") == 0
    found = json.loads((tmp_path / "other_golds" / "mine.json").read_text())
    assert {name: num for name, num in found["statuses"].items() if num} == {"right": 5, "wrong": 19, "no_answer": 16}
    assert found["pass@k"]["1"]["value"] == pytest.approx(5 / 40)
    assert found["pass@k"]["2"]["value"] == found["maj@k"]["2"]["value"] == pytest.approx(3 / 20)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (REPLAY[:7], r"problem seven has samples \[0, 1, 2\], where 0 to 3 are needed"),
        ([*REPLAY, REPLAY[0]], r"problem half has samples \[0, 0, 1, 2, 3\]"),
        ([{"id": "x", "sample": 0}], r"mine.jsonl:1: no row of generations \(gold, num_tokens, finish, text missing\)"),
        ([REPLAY[0] | {"text": 5}], "text is 5, not text"),
        ([REPLAY[0] | {"finish": "eos"}], "finish is 'eos', not stop or length"),
        ([], "its file of generations is empty"),
    ],
)
def test_a_broken_file_of_generations_is_named(lines, message, tmp_path, capsys):
    assert replay(tmp_path / "replay", lines) == 2
    assert re.search(message, capsys.readouterr().err)
