"""The report's numbers: curves of a log, points that may go, the paper's table, and JSON that is safe in a page."""

import json
import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d3s_megatron.report.__main__ import main, names_of
from d3s_megatron.report.collect import Skipped, curves, paper_table, read_rows, settings_table, stage_seconds
from d3s_megatron.report.page import make_page, safe_json
from d3s_megatron.report.run_log import COLUMNS, RunLog
from d3s_megatron.report.thin import spread, thin
from d3s_megatron.report.trackers import TRACKERS, Trackers, check_installed


def step(number, **values):
    return {"step": number, "progress": 0.0, "tokens_trained": 10 * (number + 1), "time/step": 2.0, **values}


ROWS = [
    {"step": 0, "eval/pass@1": 0.25},
    step(0, reward=0.5, **{"time/rollout": 0.5, "time/cpu": 9.0}),
    step(1, reward=None, **{"time/rollout": 1.5, "time/cpu": 9.0}),
    {"step": 2, "eval/pass@1": 0.75},
]


def test_curves_stand_at_steps_done_tokens_trained_and_seconds_so_far():
    found = curves(ROWS)
    assert found["x"] == {"step": [0, 1, 2, 2], "tokens": [0, 10, 20, 20], "seconds": [0, 2.0, 4.0, 4.0]}
    assert found["series"]["eval/pass@1"] == [[0, 3], [0.25, 0.75]]
    assert found["series"]["reward"] == [[1, 2], [0.5, None]]  # a gap, not a zero


def test_stage_seconds_are_means_and_say_what_no_stage_took():
    assert stage_seconds(ROWS) == {"rollout": 1.0, "other": 1.0}
    assert stage_seconds([]) == {} and curves([]) == {"x": {"step": [], "tokens": [], "seconds": []}, "series": {}}


values = st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), max_size=300)


@given(values, st.integers(4, 60))
def test_thinned_points_are_few_and_hold_both_extremes(column, most):
    kept = thin(column, most)
    assert kept == sorted(set(kept)) and len(kept) <= most + 1
    numbers = [value for value in column if value is not None]
    left = [column[i] for i in kept if column[i] is not None]
    if numbers:
        assert (min(left), max(left)) == (min(numbers), max(numbers))
    if column:
        assert kept[-1] == len(column) - 1


@given(st.integers(0, 500), st.integers(1, 50))
def test_a_spread_is_even_and_ends_at_the_end(num, most):
    chosen = spread(num, most)
    assert len(chosen) <= most and chosen == sorted(set(chosen))
    assert not num or chosen[-1] == num - 1


def test_a_line_that_is_being_written_is_left_out_and_a_broken_one_counted(tmp_path):
    path, skipped = tmp_path / "log.jsonl", Skipped()
    path.write_text(json.dumps({"step": 0}) + '\n{"broken\n' + json.dumps({"step": 1}) + '\n{"step": 2, "rew')
    assert [row["step"] for row in read_rows(path, skipped)] == [0, 1]
    assert str(skipped) == "1 lines of the log"


@given(st.recursive(st.text(), lambda inner: st.lists(inner, max_size=3), max_leaves=8))
def test_json_in_a_page_ends_no_script_and_reads_back(value):
    text = safe_json([value, "</script><script>alert(1)</script><!--", "\u2028\ud800"])
    assert not set("<>&\u2028") & set(text) and text.isascii()
    assert json.loads(text)[0] == value


def test_a_number_that_is_not_finite_never_reaches_the_page():
    with pytest.raises(ValueError):
        safe_json({"x": math.nan})


def test_the_page_names_no_address():
    page = make_page({}, "")
    assert "http:" not in page and "https:" not in page and "{{" not in page
    assert "default-src 'none'" in page


def test_settings_of_several_runs_are_those_that_differ():
    runs = [{"settings": {"algorithm.name": name, "train.seed": 0, "train.output_dir": name}} for name in "ab"]
    assert settings_table(runs) == [["algorithm.name", "a", "b"]]
    assert settings_table(runs[:1]) == [["algorithm.name", "a"], ["train.seed", "0"]]


def test_our_row_beside_the_papers_holds_whole_sets_only(tmp_path):
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "evaluation" / "summary.csv").write_text(
        "set,num_problems,num_samples,pass@1,pass@8\naime24,30,32,0.125,0.5\namc23,3,32,1.0,1.0\naime25,30,4,0.1,\n"
    )
    table = paper_table({"mine": tmp_path, "none": tmp_path / "evaluation"})
    assert table["columns"][:3] == ["aime24", "aime25", "amc23"]
    assert table["ours"][0] == ["mine, evaluation", "12.5 / 50.0", "10.0", "", "", "", "", "", ""]
    d3s = next(row for row in table["paper"] if row[0] == "Qwen2.5-Math-7B, GRPO+D3S")
    assert d3s[1] == "20.3 / 48.2" and d3s[-1] == "34.3 / 56.8"
    assert paper_table({"mine": tmp_path / "nothing"})["ours"] == [["mine", *[""] * 8]]


def test_names_are_as_short_as_tells_runs_apart(tmp_path):
    first, second = tmp_path / "a" / "run", tmp_path / "b" / "run"
    assert list(names_of([first, second])) == ["a/run", "b/run"] and list(names_of([first])) == ["run"]
    with pytest.raises(ValueError, match="given twice"):
        names_of([first, first])


def test_a_folder_that_is_no_run_is_named(tmp_path, capsys):
    assert main([str(tmp_path), "-o", str(tmp_path / "r.html")]) == 2
    assert "is no run" in capsys.readouterr().err and not (tmp_path / "r.html").exists()


def test_a_tracker_that_is_not_installed_is_named_with_its_remedy():
    missing = next(name for name in TRACKERS if name not in sys.modules)
    try:
        check_installed([missing])
    except ValueError as said:
        assert f"pip install {missing}" in str(said)


def test_trackers_get_finite_numbers_by_steps_done_and_a_resumed_run_its_old_entry(tmp_path, monkeypatch):
    entries = []

    class Memory:
        def __init__(self, project, name, settings, folder, ids):
            self.rows = []
            entries.append((project, name, settings, ids.setdefault("memory", f"entry {len(entries)}"), self.rows))

        def log(self, values, step):
            self.rows.append((step, values))

        def close(self):
            self.rows.append("closed")

    monkeypatch.setitem(TRACKERS, "memory", Memory)
    for goes_on in (False, True):
        trackers = Trackers(["memory"], "project", "run", {"a.b": 1}, tmp_path, goes_on)
        log = RunLog(tmp_path, True, trackers=trackers)
        log.event({"step": 0, "eval/pass@1": 0.5}, "evaluated")
        log._write({"step": 0, "progress": 0.0, "loss": math.nan, "reward": 1.0})
        log.close()
    assert entries[0][:4] == ("project", "run", {"a.b": 1}, "entry 0") and entries[1][3] == "entry 0"
    assert entries[0][4] == [(0, {"eval/pass@1": 0.5}), (1, {"progress": 0.0, "reward": 1.0}), "closed"]


def test_the_live_table_is_plain_lines_of_one_width(tmp_path, capsys):
    """Readable in a log file: no control characters, a heading again now and then."""
    row = {name: 0.5 for name in ("reward", "entropy", "kl", "sur", "grad_norm")}
    row |= {name: 7 for name in ("num_kept", "num_rollouts", "num_kept_tokens", "num_scored_tokens")}
    row |= {f"time/{name}": 0.1 for name in ("rollout", "reward", "score", "update", "sync", "step")}
    log = RunLog(tmp_path, True)
    for number in range(30):
        log.step({"step": number, "progress": 0.0, **row})
    log.close()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 32 and len({len(line) for line in lines}) == 1
    assert all(line.isprintable() for line in lines)
    assert lines[0].split()[0] == COLUMNS[0][0] and lines[0] == lines[26]
