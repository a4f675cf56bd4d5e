"""The arithmetic example's model folder: ordinary, reproducible, and readable by the engine."""

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from d3s_megatron.data import DataConfig, encode_prompts, load_problems
from d3s_megatron.data.arithmetic import write_arithmetic
from d3s_megatron.rollout import RolloutConfig, Sampling, make_requests
from d3s_megatron.rollout.transformers_engine import TransformersEngine

SCRIPT = Path(__file__).parents[3] / "examples" / "arithmetic" / "warm_start.py"


@pytest.fixture(scope="module")
def warm_start():
    spec = importlib.util.spec_from_file_location("warm_start", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def trained(warm_start, tmp_path_factory):
    """Folders of the task and of a model after 30 steps, and the accuracy that was reported for it."""
    data = tmp_path_factory.mktemp("task")
    write_arithmetic(data, seed=0)
    return data, data / "model", warm_start.warm_start(data, data / "model", seed=0, target=1.0, steps=30)


def test_the_tokenizer_comes_back_from_the_folder(warm_start, trained):
    tokenizer = AutoTokenizer.from_pretrained(trained[1])
    assert len(tokenizer) == 13 and tokenizer.eos_token == tokenizer.pad_token == "<|endoftext|>"
    assert tokenizer("12+34=")["input_ids"] == [1, 2, 10, 3, 4, 11]
    assert tokenizer.decode([0, 4, 6, 12], skip_special_tokens=True) == "046"


def test_the_reported_accuracy_is_the_mean_probability_of_the_right_answer(trained):
    data, folder, reported = trained
    config = DataConfig(prompt_template="raw", limit=100)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert 250_000 < sum(p.numel() for p in model.parameters()) < 350_000
    prompts, _ = encode_prompts(load_problems(data / "eval.jsonl", config), tokenizer, config)
    rollouts = TransformersEngine(folder, RolloutConfig()).generate(
        make_requests(prompts, 40, seed=0, step=0), Sampling(max_new_tokens=5)
    )
    right = sum(r.text == r.request.prompt.answer and r.finish_reason == "stop" for r in rollouts) / len(rollouts)
    assert 0.002 < reported < 0.05 and abs(right - reported) < 0.01  # 4,000 answers: deviation below 0.004


def test_the_same_seed_gives_the_same_model(warm_start, trained, tmp_path):
    again = warm_start.warm_start(trained[0], tmp_path, seed=0, target=1.0, steps=30)
    assert again == trained[2]
    first, second = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (trained[1], tmp_path))
    assert all(torch.equal(first[name], second[name]) for name in first)
