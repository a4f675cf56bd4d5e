"""The rewards a configuration can name, and what they report."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from d3s_megatron.rewards import RewardConfig, check_golds, make_reward
from d3s_megatron.rewards.__main__ import main
from d3s_megatron.rewards.reward import STATUSES
from d3s_megatron.types import Verdict

ROOT = Path(__file__).parents[3]


def test_exact_compares_stripped_text():
    items = [("046", "046"), (" 046\n", "046"), ("46", "046"), ("", "046"), ("046", " "), ("7", 7)]
    with make_reward(RewardConfig(kind="exact")) as reward:
        verdicts = reward.grade(items)
    assert [(v.value, v.status) for v in verdicts] == [
        (1.0, "right"),
        (1.0, "right"),
        (0.0, "wrong"),
        (0.0, "no_answer"),
        (0.0, "unparsable_gold"),
        (1.0, "right"),
    ]


def test_math_verify_gives_every_status_and_counts_them():
    items = [
        (r"\boxed{\frac{1}{2}}", "0.5"),
        (r"\boxed{7}", "0.5"),
        ("it is 7", "7"),
        (r"\boxed{64}", ""),
        (r"\boxed{42}", 42),
        (r"\boxed{9^{9^{9^{9}}}}", "7"),
    ]
    with make_reward(RewardConfig()) as reward:
        statuses = [verdict.status for verdict in reward.grade(items)]
        report = reward.report()
        assert reward.report() == {f"rewards/{status}": 0.0 for status in STATUSES}
    assert statuses == ["right", "wrong", "no_answer", "unparsable_gold", "right", "wrong"]
    assert report == {
        "rewards/right": 2.0,
        "rewards/wrong": 2.0,
        "rewards/no_answer": 1.0,
        "rewards/unparsable_gold": 1.0,
        "rewards/timeout": 0.0,
        "rewards/crash": 0.0,
    }


def test_a_function_of_the_user():
    with make_reward(RewardConfig(kind="sample_judges:length")) as reward:
        assert [v.value for v in reward.grade([("abcd", "8"), ("", "8")])] == [0.5, 0.0]


def test_an_answer_without_a_verdict_is_nan():
    with make_reward(RewardConfig(kind="sample_judges:obey", deadline_seconds=6.0)) as reward:
        die, spin, fine = reward.grade([("die", ""), ("spin", ""), ("say 1", "")])
    assert math.isnan(die.value) and die.status == "crash"
    assert math.isnan(spin.value) and spin.status == "timeout"
    assert fine == Verdict(1.0, "right")


def test_a_mixture_weighs_its_parts_and_logs_them():
    config = RewardConfig(kind="mixture", mixture={"exact": 1.0, "sample_judges:length": -0.5})
    with make_reward(config) as reward:
        verdicts = reward.grade([("2", "2"), ("1", "2")])
        twice = [2 * number for number in reward.numbers()]  # as of two processes
        report = reward.report()
        reward.grade([("2", "2"), ("1", "2")])
        of_both = reward.report(twice)
        assert set(reward.numbers()) == {0.0}
    assert verdicts == [Verdict(1.0 - 0.5 * 0.5, "right"), Verdict(-0.25, "wrong")]
    assert report["rewards/exact/mean"] == 0.5 and report["rewards/sample_judges:length/mean"] == 0.5
    assert report["rewards/exact/right"] == 1.0 and report["rewards/right"] == 1.0
    assert of_both == {name: value if name.endswith("/mean") else 2 * value for name, value in report.items()}


def test_a_mixture_has_no_value_where_a_part_has_none():
    config = RewardConfig(kind="mixture", mixture={"exact": 1.0, "sample_judges:obey": 1.0})
    with make_reward(config) as reward:
        (verdict,) = reward.grade([("raise", "")])
    assert math.isnan(verdict.value) and verdict.status == "crash"


def test_a_batch_without_any_reward_is_a_warning(caplog):
    with make_reward(RewardConfig(kind="exact")) as reward:
        reward.grade([("1", "2")] * 7 + [("2", "2")])
        assert not caplog.records
        reward.grade([("1", "2")] * 8)
    assert "not one of 8 answers was rewarded: {'wrong': 8}" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "maths"}, r"rewards.kind is 'maths': choose math_verify, exact, mixture, or"),
        ({"kind": "mixture"}, r"rewards.mixture is \{\} with rewards.kind 'mixture'"),
        ({"mixture": {"exact": 1.0}}, "weights belong to kind mixture"),
        ({"kind": "mixture", "mixture": {"mixture": 1.0}}, "has a part 'mixture'"),
        ({"kind": "mixture", "mixture": {"exact": math.inf}}, "a weight is a finite number"),
        ({"num_workers": 0}, "rewards.num_workers is 0: at least 1"),
        ({"deadline_seconds": 0.0}, "rewards.deadline_seconds is 0.0"),
        ({"memory_limit_mb": 10}, "rewards.memory_limit_mb is 10"),
    ],
)
def test_a_bad_configuration_is_one_clear_error(changes, message):
    with pytest.raises(ValueError, match=message):
        RewardConfig(**changes)


def test_golds_that_do_not_parse_are_named():
    golds = [("a", "3"), ("b", ""), ("c", r"\frac{1}{"), ("d", r"\text{no solution}"), ("e", "63"), ("f", 42)]
    assert check_golds(golds) == ["b", "c"]


def test_the_package_and_its_workers_start_without_torch():
    code = "import sys, d3s_megatron.rewards, d3s_megatron.rewards.math_judge; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_command_grades_a_file_the_same_twice(tmp_path, capsys):
    rows = [
        {"id": "a", "gold": "1/2", "prediction": r"\boxed{0.5}"},
        {"id": "b", "gold": 7, "prediction": "seven"},
        {"id": "c", "gold": None, "prediction": r"\boxed{1}"},
    ]
    path = tmp_path / "cases.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    command = [sys.executable, "-m", "d3s_megatron.rewards", "--file", str(path)]
    first = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert main(["--file", str(path)]) == 0
    assert capsys.readouterr().out == first
    assert [json.loads(line) for line in first.splitlines()] == [
        {"id": "a", "value": 1.0, "status": "right"},
        {"id": "b", "value": 0.0, "status": "no_answer"},
        {"id": "c", "value": 0.0, "status": "unparsable_gold"},
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"id": 1, "gold": "2"}', ":1: missing prediction"),
        ('{"id": 1, "gold": "2", "prediction": "3"}\n{', ":2: not a JSON object"),
        ("[1]", ":1: missing id, gold, prediction"),
    ],
)
def test_a_broken_row_is_named(tmp_path, capsys, content, message):
    path = tmp_path / "cases.jsonl"
    path.write_text(content)
    assert main(["--file", str(path)]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.out == ""


def test_a_missing_file_is_one_line(tmp_path, capsys):
    assert main(["--file", str(tmp_path / "nothing.jsonl")]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
