"""D3S with vLLM rollouts, colocated with a TP 2 actor in the same two processes: an engine each, and one over both."""

import json

import pytest
from builders import addition_file, tiny_model
from helpers import run_python

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm runs these in an environment of its own")


@pytest.mark.parametrize("engine_ranks", [1, 2])
def test_engine_and_actor_agree_at_every_step(tmp_path, monkeypatch, engine_ranks):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    model = tiny_model(tmp_path / "model", hidden_size=128, intermediate_size=64)
    flags = {
        "model.path": model,
        "data.train_path": addition_file(tmp_path / "train.jsonl"),
        "data.prompt_template": "raw",
        "data.max_prompt_tokens": 16,
        "rollout.engine": "vllm",
        "rollout.max_new_tokens": 6,
        "rollout.vllm_tensor_parallel": engine_ranks,
        "rollout.max_batch_size": 16,
        "rewards.kind": "reward_functions:even_length",
        "rewards.num_workers": 1,
        "algorithm.samples_per_prompt": 4,
        "algorithm.kept_per_prompt_init": 2,
        "algorithm.kept_per_prompt_final": 4,
        "algorithm.truncated": "judge",
        "actor.tensor_model_parallel_size": 2,
        "optimizer.lr": 1e-2,  # large, so that stale weights would show
        "train.steps": 3,
        "train.prompts_per_step": 4,
        "train.output_dir": tmp_path / "run",
    }
    args = [part for key, value in flags.items() for part in (f"--{key}", str(value))]
    done = run_python(["-m", "d3s_megatron.train", *args], 2, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "reward" in row]
    assert [row["num_kept"] for row in steps] == [8, 12, 16]
    assert all(row["num_updates"] == 1 and row["mismatch_max"] < 1e-3 for row in steps)
