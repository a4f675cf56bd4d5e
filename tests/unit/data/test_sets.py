import json

import pytest
from helpers import SHARED

from d3s_megatron.data import fetch, load_set
from d3s_megatron.data.sets import NUM_PROBLEMS


def write(path, rows):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


ROWS = [{"id": f"q{i}", "problem": f"{i}+1=", "answer": str(i + 1)} for i in range(3)]


@pytest.mark.parametrize("place", [".", "eval"])
def test_a_set_is_found_in_the_folder_or_below_eval(tmp_path, place):
    write(tmp_path / place / "mine.jsonl", ROWS)
    assert [p.id for p in load_set(tmp_path, "mine")] == ["q0", "q1", "q2"]
    assert [p.answer for p in load_set(tmp_path, "mine", limit=2)] == ["1", "2"]


def test_a_missing_set_is_named_with_those_that_are_there(tmp_path):
    write(tmp_path / "eval" / "mine.jsonl", ROWS)
    with pytest.raises(ValueError, match=r"set 'gsm8k'.*sets there: mine.*--data FOLDER.*data\.fetch"):
        load_set(tmp_path, "gsm8k")


@pytest.mark.skipif(not (SHARED / "data").is_dir(), reason="no evaluation sets in a shared folder beside the project")
def test_the_seven_sets_have_the_known_sizes():
    assert {name: len(load_set(SHARED / "data", name)) for name in NUM_PROBLEMS} == NUM_PROBLEMS
    assert list(fetch.SOURCES) == list(NUM_PROBLEMS)


PUBLISHED = {
    "aime24": ({"problem": " p ", "answer": "025"}, "aime24-00", "25"),
    "aime25": ({"problem": "p", "answer": "336^\\circ"}, "aime25-00", "336"),
    "amc23": ({"problem": "p", "answer": 27.0}, "amc23-00", "27"),
    "gsm8k": ({"question": "p", "answer": "1 + 1 = <<1+1=2>>2\n#### 70,000"}, "gsm8k-test-0000", "70000"),
    "math500": ({"problem": "p", "answer": r"\pi", "unique_id": "test/algebra/7.json"}, "math500-algebra-7", r"\pi"),
    "minerva": ({"problem": "p", "solution": r"so \boxed{\frac{1}{2}} m", "idx": 7}, "minerva-007", r"\frac{1}{2}"),
    "olympiadbench": ({"question": "p", "final_answer": ["$2$"], "id": 1606}, "olympiadbench-1606", "2"),
}  # fmt: skip


@pytest.mark.parametrize("name", NUM_PROBLEMS)
def test_published_rows_become_ours(name, monkeypatch):
    row, id, answer = PUBLISHED[name]
    monkeypatch.setitem(NUM_PROBLEMS, name, 1)
    ours = fetch.normalised(name, (json.dumps(row) + "\n").encode())
    assert json.loads(ours) == {"id": id, "problem": "p", "answer": answer, "source": fetch.SOURCES[name].name}
    assert ours.endswith(b"}\n") and b'"id":"' in ours


def test_a_list_of_answers_keeps_its_signs():
    assert fetch.SOURCES["olympiadbench"].answer({"final_answer": ["$69$,$84$"]}) == "$69$,$84$"


def test_rows_that_are_missing_or_other_than_published_are_refused():
    with pytest.raises(ValueError, match="aime24: 1 rows came, 30 were expected"):
        fetch.normalised("aime24", b'{"problem": "p", "answer": 1}\n')
    with pytest.raises(ValueError, match="row 0 is not as published before .KeyError: 'question'"):
        fetch.normalised("gsm8k", b'{"problem": "p", "answer": "#### 1"}\n')


def test_without_a_network_one_line_says_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fetch, "HOST", "http://127.0.0.1:9")  # nothing listens there
    assert fetch.main(["--out", str(tmp_path / "data"), "--sets", "aime24"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "cannot fetch aime24" in error and "copy aime24.jsonl" in error
    assert not (tmp_path / "data").exists()
    assert fetch.main(["--out", str(tmp_path), "--sets", "aime24,nosuch"]) == 2
    assert "--sets names nosuch" in capsys.readouterr().err
