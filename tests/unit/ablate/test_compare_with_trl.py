"""The job that TRL gets is the run of ours: the same prompts in the same order, the same numbers."""

import importlib.util
import json

from builders import addition_file, tiny_model, tiny_run
from helpers import ROOT

from d3s_megatron.config import parse_config
from d3s_megatron.data import PromptOrder


def load_tool():
    spec = importlib.util.spec_from_file_location("compare_with_trl", ROOT / "tools" / "compare_with_trl.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_job_is_a_run_of_ours(tmp_path):
    settings = tiny_run(tiny_model(tmp_path / "model"), addition_file(tmp_path / "train.jsonl"), tmp_path / "run", 5)
    settings |= {"train.seed": 3, "train.eval_every": 2, "algorithm.name": "grpo"}
    config = parse_config([part for key, value in settings.items() for part in (f"--{key}", str(value))])
    job = json.loads(load_tool().write_job(config, tmp_path / "trl", evaluate=True).read_text())
    lines = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    order = PromptOrder(len(lines), 4, seed=3)
    wanted = [lines[i] for step in range(5) for i in order.batch(step)]
    assert [p["prompt"] for p in job["prompts"]] == [line["problem"] for line in wanted]
    assert [p["answer"] for p in job["held_out"]] == [line["answer"] for line in lines]
    assert (job["seed"], job["steps"], job["lr"], job["eval_every"], job["eval_samples"]) == (3, 5, 1e-3, 2, 2)
    assert (job["prompts_per_step"], job["samples_per_prompt"], job["max_new_tokens"]) == (4, 4, 6)
