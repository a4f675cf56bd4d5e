"""Bad input ends with one line that names field, value and remedy, on every rank, without a hang."""

import json

import pytest
from builders import addition_file, tiny_model
from helpers import run_python

from d3s_megatron.build import preflight
from d3s_megatron.config import parse_config


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    return {
        "model.path": tiny_model(folder / "model"),
        "data.train_path": addition_file(folder / "train.jsonl"),
        "data.prompt_template": "raw",
        "data.max_prompt_tokens": 16,
        "rollout.max_new_tokens": 6,
        "rewards.kind": "exact",
        "train.output_dir": folder / "run",
    }


def flags(settings):
    return [part for key, value in settings.items() for part in (f"--{key}", str(value))]


CONFIG_MISTAKES = [
    ({"algorithm.nam": "d3s"}, ["algorithm.nam"]),
    ({"train.steps": "many"}, ["train.steps", "many"]),
    ({"algorithm.samples_per_prompt": "1"}, ["samples_per_prompt", "1", "at least 2"]),
    ({"algorithm.kept_per_prompt_final": "64"}, ["kept_per_prompt_final", "64", "32"]),
    ({"algorithm.token_share_init": "0"}, ["token_share_init", "0"]),
    ({"algorithm.token_share_final": "1.5"}, ["token_share_final", "1.5"]),
    ({"algorithm.name": "ppo"}, ["algorithm.name", "ppo", "d3s"]),
    ({"rollout.temperature": "0"}, ["rollout.temperature", "0"]),
    ({"model.path": "/nowhere"}, ["model.path", "/nowhere"]),
    ({"actor.sequence_parallel": "true"}, ["sequence_parallel", "tensor_model_parallel_size"]),
]


@pytest.mark.parametrize(("change", "named"), CONFIG_MISTAKES, ids=lambda v: next(iter(v)) if v else "")
def test_a_wrong_setting_is_named_in_one_line(change, named, good, capsys):
    with pytest.raises(SystemExit) as ended:
        parse_config(flags(good | change))
    line = capsys.readouterr().err
    assert ended.value.code == 2 and line.startswith("error: ") and line.count("\n") == 1
    for word in named:
        assert word in line


def refusal(good, **change):
    config = parse_config(flags(good | {key.replace("__", "."): value for key, value in change.items()}))
    with pytest.raises(ValueError) as refused:
        preflight(config)
    return str(refused.value)


def test_a_layout_that_does_not_fit_the_model_or_the_world_is_refused(good, tmp_path, monkeypatch):
    assert "multiple of 3" in refusal(good, actor__tensor_model_parallel_size=3)
    monkeypatch.setenv("WORLD_SIZE", "24")
    assert "num_attention_heads 4" in refusal(good, actor__tensor_model_parallel_size=3)
    assert "2 layers" in refusal(good, actor__pipeline_model_parallel_size=4)


def test_broken_data_names_file_and_line(good, tmp_path):
    path = tmp_path / "broken.jsonl"
    path.write_text('{"problem": "1+1=", "answer": "2"}\n{"problem": "1+2="}\n')
    assert f"{path}" in refusal(good, data__train_path=path) and "2" in refusal(good, data__train_path=path)
    path.write_text("")
    assert "no problems" in refusal(good, data__train_path=path)


def test_long_prompts_are_refused_or_dropped_and_counted(good, tmp_path):
    path = tmp_path / "long.jsonl"
    rows = [{"problem": p, "answer": "2"} for p in ("1+1=", "1" * 30)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "data.max_prompt_tokens" in refusal(good, data__train_path=path, data__overlong="refuse")
    questions = preflight(parse_config(flags(good | {"data.train_path": path})))
    assert len(questions.train) == 1 and "1 prompts dropped" in questions.notes[0]


def test_an_unknown_family_a_missing_weight_and_positions_that_do_not_reach(good, tmp_path):
    model = tiny_model(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": ["Mamba"], "model_type": "mamba"}))
    assert "mamba" in refusal(good, model__path=model).lower()
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    assert "layers.2" in refusal(good, model__path=model)
    assert "max_new_tokens" in refusal(good, rollout__max_new_tokens=1000)


def test_an_earlier_run_is_not_overwritten(good, tmp_path):
    (tmp_path / "log.jsonl").write_text("{}\n")
    assert "overwrite" in refusal(good, train__output_dir=tmp_path)


def test_every_rank_ends_and_one_line_is_printed(good):
    done = run_python(["-m", "d3s_megatron.train", *flags(good | {"data.train_path": "/nowhere.jsonl"})], 2)
    assert done.returncode != 0
    assert done.stderr.count("error: ") == 1 and "/nowhere.jsonl" in done.stderr
