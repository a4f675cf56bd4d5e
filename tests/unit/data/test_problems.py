"""Problem files: what is read, and that every kind of bad row is named with its file, line, field and remedy."""

import json
import re

import pyarrow
import pyarrow.parquet
import pytest

from d3s_megatron.data import DataConfig, Problem, load_problems

ROWS = [{"id": "a", "problem": "1+1=", "answer": "2"}, {"id": "b", "problem": "2+2=", "answer": "4"}]


def write(folder, *lines):
    path = folder / "set.jsonl"
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines), "utf-8")
    return path


def test_jsonl_and_parquet_give_the_same_problems(tmp_path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "set.parquet")
    expected = [Problem("a", "1+1=", "2"), Problem("b", "2+2=", "4")]
    assert load_problems(write(tmp_path, *ROWS), DataConfig()) == expected
    assert load_problems(tmp_path / "set.parquet", DataConfig()) == expected


def test_field_names_limit_and_missing_ids(tmp_path):
    path = write(tmp_path, {"q": "1+1=", "a": "2"}, "\n", {"q": "2+2=", "a": "4"}, {"q": "3+3=", "a": "6"})
    config = DataConfig(problem_field="q", answer_field="a", limit=2, eval_limit=1)
    assert [p.id for p in load_problems(path, config)] == ["set-1", "set-3"]  # line numbers
    assert len(load_problems(path, config.for_evaluation())) == 1


@pytest.mark.parametrize(("written", "answer"), [("42", "42"), ("1.50", "1.50"), ("-3", "-3"), ('"042"', "042")])
def test_numbers_are_taken_as_written(tmp_path, written, answer):
    path = write(tmp_path, f'{{"id": 7, "problem": "p", "answer": {written}}}\n')
    assert load_problems(path, DataConfig()) == [Problem("7", "p", answer)]


def test_parquet_numbers_become_text(tmp_path):
    table = pyarrow.table({"id": [7], "problem": ["p"], "answer": [42]})
    pyarrow.parquet.write_table(table, tmp_path / "set.parquet")
    assert load_problems(tmp_path / "set.parquet", DataConfig()) == [Problem("7", "p", "42")]


def test_line_separators_inside_a_text_do_not_break_the_row(tmp_path):
    path = tmp_path / "set.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + '{"problem": "a\u2028b\u0085c", "answer": "1"}\r\n'.encode())
    assert load_problems(path, DataConfig()) == [Problem("set-1", "a\u2028b\u0085c", "1")]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ('{"id": "c", "problem": \n', "set.jsonl:3: broken row"),
        ("[1]\n", "set.jsonl:3: a list where an object"),
        ('{"problem": "p", "answer": NaN}\n', "set.jsonl:3: broken row"),
        ({"id": "c", "problem": "p"}, "set.jsonl:3: field 'answer' is missing (found: id, problem)"),
        ({"id": "c", "answer": "1"}, "set data.problem_field"),
        ({"id": "c", "problem": "p", "answer": " "}, "set.jsonl:3: field 'answer' is empty"),
        ({"id": "c", "problem": "", "answer": "1"}, "set.jsonl:3: field 'problem' is empty"),
        ({"id": "c", "problem": "p", "answer": None}, "set.jsonl:3: field 'answer' is None, a NoneType"),
        ({"id": "c", "problem": "p", "answer": True}, "field 'answer' is True, a bool"),
        ({"id": "c", "problem": ["p"], "answer": "1"}, "field 'problem' is ['p'], a list"),
        ({"id": "a", "problem": "p", "answer": "1"}, "field 'id' is 'a' again (first at"),
    ],
)
def test_a_bad_row_is_named(tmp_path, bad, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        load_problems(write(tmp_path, *ROWS, bad), DataConfig())


def test_bytes_that_are_no_text_are_named(tmp_path):
    path = tmp_path / "set.jsonl"
    path.write_bytes(b'{"problem": "p", "answer": "1"}\n{"problem": "\xff", "answer": "1"}\n')
    with pytest.raises(ValueError, match=r"set\.jsonl:2: not UTF-8"):
        load_problems(path, DataConfig())


def test_a_parquet_row_or_column_that_is_missing_is_named(tmp_path):
    table = pyarrow.table({"problem": ["p", "q"], "answer": ["1", None]})
    pyarrow.parquet.write_table(table, tmp_path / "set.parquet")
    with pytest.raises(ValueError, match=r"set\.parquet row 2: field 'answer' is None"):
        load_problems(tmp_path / "set.parquet", DataConfig())
    with pytest.raises(ValueError, match=r"field 'gold' is missing \(found: problem, answer\); set data\.answer_field"):
        load_problems(tmp_path / "set.parquet", DataConfig(answer_field="gold"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("set.jsonl", b"", "holds no problems"),
        ("set.jsonl", b"\n\n", "holds no problems"),
        ("set.csv", b"problem,answer\n", "unknown ending '.csv'"),
        ("set.parquet", b"PAR1 not really", "not a readable Parquet file"),
        ("set.jsonl", None, "no such file; set data.train_path"),
    ],
)
def test_a_bad_file_is_named(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(message)):
        load_problems(tmp_path / name, DataConfig())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_template": "Solve it."}, "data.prompt_template is 'Solve it.'"),
        ({"prompt_template": "raw", "system_prompt": "s"}, "data.system_prompt is set"),
        ({"overlong": "cut"}, "data.overlong is 'cut'"),
        ({"max_prompt_tokens": 0}, "data.max_prompt_tokens is 0"),
        ({"limit": 0}, "data.limit is 0"),
        ({"answer_field": ""}, "data.answer_field is empty"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        DataConfig(**options)
