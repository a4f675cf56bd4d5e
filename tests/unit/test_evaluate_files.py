"""Chunks of work and files of generations, without an engine."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from d3s_megatron.evaluate.config import Scoring, fingerprint, recommended_sampling
from d3s_megatron.evaluate.generations import Generation, Generations, digest, read_rows
from d3s_megatron.evaluate.summary import Answer, summarise
from d3s_megatron.evaluate.tables import as_csv, beside_paper, table
from d3s_megatron.evaluate.work import check_done, pending, seed_of
from d3s_megatron.report.text import in_columns
from d3s_megatron.types import Prompt

PROMPTS = [Prompt(f"p{i}", f"{i}+1=", (1, 2), str(i + 1)) for i in range(5)]


def row(id, sample, text="x"):
    prompt = PROMPTS[int(id[1:])]
    return Generation(id, sample, prompt.answer, digest(prompt), 3, "stop", text)


def asked(chunks):
    return [(r.prompt.id, s) for chunk in chunks for r, s in zip(chunk.requests, chunk.samples, strict=True)]


@given(st.integers(1, 6), st.integers(1, 12), st.sets(st.integers(0, 29)))
def test_what_is_pending_is_what_is_not_there_in_chunks_that_do_not_depend_on_it(num_samples, chunk_size, there):
    line = [(prompt.id, sample) for prompt in PROMPTS for sample in range(num_samples)]
    done = {key: row(*key) for place, key in enumerate(line) if place in there}
    whole, rest = (pending("s", PROMPTS, num_samples, 0, chunk_size, d) for d in ({}, done))
    assert asked(whole) == line and asked(rest) == [key for key in line if key not in done]
    numbers = {key: chunk.number for chunk in whole for key in asked([chunk])}
    assert all(numbers[key] == chunk.number for chunk in rest for key in asked([chunk]))
    assert all(len(chunk.requests) <= chunk_size for chunk in whole)


def test_a_seed_is_that_of_the_answer_whatever_else_is_asked():
    few = pending("s", PROMPTS[:2], 2, 7, 3, {})
    many = pending("s", PROMPTS, 5, 7, 4, {})

    def seeds(chunks):
        return {(r.prompt.id, s): r.seed for c in chunks for r, s in zip(c.requests, c.samples, strict=True)}

    assert seeds(few).items() <= seeds(many).items()
    assert len(set(seeds(many).values())) == 25
    assert seed_of(7, "s", "p0", 0) != seed_of(7, "t", "p0", 0) != seed_of(8, "t", "p0", 0)


TEXT = st.text(st.characters(codec=None), max_size=20)  # lone surrogates and line separators included


@settings(max_examples=30)
@given(st.lists(TEXT, min_size=4, max_size=4))
def test_any_text_comes_back_and_a_merge_that_was_cut_short_is_repeated(tmp_path_factory, texts):
    files = Generations(tmp_path_factory.mktemp("out"), "s")
    rows = [row(id, sample, texts[2 * (id == "p3") + sample]) for id in ("p3", "p1") for sample in (0, 1)]
    files.write_chunk(1, rows[:3])
    files.write_chunk(0, rows[3:])
    assert files.read() == {(r.id, r.sample): r for r in rows}
    files.merge(["p1", "p3"])
    merged = files.path.read_bytes()
    assert read_rows(files.path) == sorted(rows, key=lambda r: (r.id, r.sample)) and not files.parts.exists()
    files.write_chunk(0, rows[3:])  # as if it had not been removed
    files.merge(["p1", "p3"])
    assert files.path.read_bytes() == merged


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row("p4", 0)], "problem p4, which is not asked now"),
        ([row("p0", 2)], "sample 2 of problem p0, and --samples is 2: give at least 3"),
        ([replace(row("p0", 0), prompt="other")], "problem p0 with another prompt or gold"),
    ],
)
def test_what_belongs_to_another_evaluation_is_refused(tmp_path, rows, message):
    files = Generations(tmp_path, "s")
    files.write_chunk(0, rows)
    with pytest.raises(ValueError, match=message):
        check_done(files, PROMPTS[:2], 2)


def test_the_fingerprint_sees_a_change_anywhere_in_a_large_file(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    weights = bytearray(1 << 20)
    path = tmp_path / "model.safetensors"
    path.write_bytes(weights)
    before = fingerprint(tmp_path)
    weights[len(weights) // 2] = 1
    path.write_bytes(weights)
    assert fingerprint(tmp_path) != before


def test_sampling_recommended_by_the_model(tmp_path):
    assert recommended_sampling(tmp_path) == {}
    given = {"temperature": 0.6, "top_p": None, "do_sample": True, "eos_token_id": 3}
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    assert recommended_sampling(tmp_path) == {"temperature": 0.6}


@pytest.mark.parametrize(("num", "ks"), [(1, (1,)), (2, (1, 2)), (8, (1, 8)), (20, (1, 8, 16)), (64, (1, 8, 16, 32))])
def test_which_k(num, ks):
    assert Scoring().ks_for(num) == ks


def evaluation(name, num_problems, num_samples=8):
    answers = [[Answer(s == 0, "right" if s == 0 else "wrong", s, 5, False) for s in range(num_samples)]]
    return summarise(name, answers * num_problems, (1, 8), 0)


def test_our_row_beside_the_papers():
    """Half of AIME was asked: its cell stays empty."""
    rows = beside_paper([evaluation("aime24", 15), evaluation("amc23", 40), evaluation("mine", 3)], "model")
    assert rows[0][1:] == ["aime24", "aime25", "amc23", "gsm8k", "math500", "minerva", "olympiadbench", "average"]
    assert rows[-1] == ["**model, here**", "", "", "12.5 / 100.0", *[""] * 5]
    assert ["Qwen2.5-Math-7B, GSPO", *[""] * 7, "33.2 / 54.7"] in rows
    d2s = ["16.9 / 42.2", "6.0 / 21.2", "49.6 / 82.8", "", "49.5 / 70.7", "", "", "31.3 / 54.1"]
    assert ["Qwen2.5-Math-7B, D2S", *d2s] in rows


def test_all_seven_sets_have_an_average_and_few_samples_no_pass_at_8():
    sizes = {"aime24": 30, "aime25": 30, "amc23": 40, "gsm8k": 1319, "math500": 500, "minerva": 272}
    evaluations = [evaluation(name, num, 4) for name, num in (sizes | {"olympiadbench": 675}).items()]
    assert beside_paper(evaluations, "m")[-1] == ["**m, here**", *["25.0"] * 8]


def test_tables_of_sets_with_unequal_samples():
    rows = table([evaluation("a", 2), evaluation("b", 3, 4)])
    assert rows[0][:6] == ["set", "problems", "answers", "pass@1", "pass@8", "maj@8"]
    assert rows[2][:6] == ["b", "3", "4", "25.0 [25.0, 25.0]", "", ""]
    assert rows[3][:6] == ["average", "", "", "18.8 [18.8, 18.8]", "", ""]
    lines = in_columns(rows).splitlines()
    assert len(lines) == 4 and lines[0].index("pass@1") + len("pass@1") == lines[1].index("]") + 1
    header, first, second = as_csv([evaluation("a", 2), evaluation("b", 3, 4)]).splitlines()
    assert header.startswith("set,num_problems,num_samples,pass@1,pass@1_low,pass@1_high,pass@8")
    assert first.startswith("a,2,8,0.125,0.125,0.125,1.0") and second.startswith("b,3,4,0.25,0.25,0.25,,")
