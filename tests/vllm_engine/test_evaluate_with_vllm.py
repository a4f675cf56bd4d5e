"""Evaluation with vLLM: greedy answers are those of the built-in engine.

vLLM reads a folder that went to a Megatron checkpoint and back.
"""

import json

import pytest
from builders import addition_file, tiny_model
from helpers import run_python

from d3s_megatron.convert.checkpoint import job, jobs

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm runs these in an environment of its own")


def test_both_engines_give_the_same_greedy_answers(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    model = tiny_model(tmp_path / "model", hidden_size=128, intermediate_size=64)  # vLLM wants heads of 32 or more
    addition_file(tmp_path / "add.jsonl", 6)
    options = ["--sets", "add", "--samples", "2", "--prompt-template", "raw", "--max-new-tokens", "8", "--temperature"]
    options += ["0", "--reward", "exact", "--chunk-size", "4", "--batch-size", "4", "--dtype", "float32"]

    job.run(jobs.import_job(model, tmp_path / "megatron", 2, 2), 1)
    job.run(jobs.export_job(tmp_path / "megatron", tmp_path / "exported"), 1)

    def answers(engine, num_processes):
        out = tmp_path / f"{engine}{num_processes}"
        folder = tmp_path / ("exported" if engine == "vllm" else "model")
        args = ["--model", folder, "--data", tmp_path, "--out", out, "--engine", engine, *options]
        done = run_python(["-m", "d3s_megatron.evaluate", *args], num_processes)
        assert done.returncode == 0, done.stderr[-3000:]
        return [json.loads(line) for line in (out / "generations" / "add.jsonl").read_text().splitlines()]

    expected = answers("transformers", 1)
    assert len(expected) == 12
    assert answers("vllm", 1) == expected
