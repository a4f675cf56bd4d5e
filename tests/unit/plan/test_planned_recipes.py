"""The recipes in examples/math: whole configurations for their model and machine, with the planner's present word."""

import re
import shlex

import pytest
from helpers import ROOT

from d3s_megatron.actor.model import check_shape
from d3s_megatron.actor.parallel import check_layout
from d3s_megatron.config import parse_config
from d3s_megatron.convert import check_tp
from d3s_megatron.plan.__main__ import main
from d3s_megatron.plan.models import MODELS, shape_of

FOLDER = ROOT / "examples" / "math"
PLANS = sorted(FOLDER.glob("*.plan.txt"))
PAPER = {"Qwen2.5-Math-1.5B", "Qwen2.5-Math-7B", "Llama-3.1-8B-Instruct", "OpenMath2-Llama3.1-8B"}


def question(plan):
    """(model, GPUs, the planner's arguments) of a committed plan."""
    command = plan.read_text().splitlines()[0]
    model, gpus = re.search(r"--model (\S+) --gpus (\d+)", command).groups()
    return model, int(gpus), shlex.split(command)[4:]


def test_the_papers_models_and_two_of_70b_have_a_recipe_with_its_plan():
    assert {question(plan)[0] for plan in PLANS} == PAPER | {"Qwen2.5-72B", "Llama-3.1-70B"}
    assert [plan.name.removesuffix(".plan.txt") for plan in PLANS] == [
        path.stem for path in sorted(FOLDER.glob("*.yaml"))
    ]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.name.removesuffix(".plan.txt"))
def test_a_recipe_fits_its_model_its_machine_and_its_plan(plan, tmp_path, monkeypatch, capsys):
    model, gpus, argv = question(plan)
    path = FOLDER / plan.name.replace(".plan.txt", ".yaml")
    config = parse_config([str(path), "--model.path", str(tmp_path), "--data.train_path", "problems.jsonl"])
    shape = shape_of(model)
    check_layout(config.actor, gpus)
    check_shape(shape, config.actor)
    check_tp(shape, config.rollout.vllm_tensor_parallel)
    assert gpus % config.rollout.vllm_tensor_parallel == 0
    assert config.data.max_prompt_tokens + config.rollout.max_new_tokens <= shape.max_positions
    assert f"models/{model} " in path.read_text() and f"examples/math/{path.name} " in path.read_text()
    monkeypatch.chdir(ROOT)
    assert main(argv) == 0
    assert capsys.readouterr().out == "".join(plan.read_text().splitlines(keepends=True)[1:])


def test_a_configuration_that_does_not_fit_is_refused_with_what_it_takes(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    argv = ["--model", "Qwen2.5-72B", "--config", "examples/math/qwen2.5-72b.yaml"]
    assert main([*argv, "--gpus", "32"]) == 2
    assert "TP 8 x PP 8, give a multiple of 64" in capsys.readouterr().err
    assert main([*argv, "--gpus", "64", "--gpu-memory", "40"]) == 2
    assert "nothing fits 64 GPUs of 40 GB: the nearest takes 59.1 GB" in capsys.readouterr().err


def test_every_known_name_can_be_asked_for():
    assert PAPER <= MODELS.keys()
