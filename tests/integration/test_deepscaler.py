"""Two steps of D3S on real problems with a real tokenizer and chat template, and a small random Qwen2."""

import json
import math
import shutil

import pytest
from helpers import SHARED

from d3s_megatron.train import main

TOKENIZER = SHARED / "tokenizers" / "qwen2.5-math-1.5b"
PROBLEMS = SHARED / "data" / "train" / "deepscaler_sub1209.jsonl"

pytestmark = pytest.mark.skipif(
    not (TOKENIZER.is_dir() and PROBLEMS.is_file()),
    reason="needs ../shared with DeepScaleR rows and the Qwen2.5-Math tokenizer, which are not part of the project",
)


@pytest.fixture
def model(tmp_path):
    """The tokenizer's files with random weights of a small width and the real vocabulary."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path / "model"
    shape = json.loads((TOKENIZER / "config.json").read_text())
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_window_layers": 2}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    Qwen2ForCausalLM(Qwen2Config(**(shape | small))).save_pretrained(folder)
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        shutil.copyfile(TOKENIZER / name, folder / name)
    return folder


def test_two_steps(model, tmp_path, monkeypatch):
    # A random model is never right: a small share of the reward goes to the length, so that there is a signal.
    (tmp_path / "mix.yaml").write_text(
        "rewards: {kind: mixture, mixture: {math_verify: 0.9, 'reward_functions:even_length': 0.1}, num_workers: 1}\n"
        "algorithm: {samples_per_prompt: 4, kept_per_prompt_init: 2, kept_per_prompt_final: 4, truncated: judge}\n"
        "rollout: {max_new_tokens: 12}\n"
        "data: {limit: 40, max_prompt_tokens: 256}\n"
        "train: {steps: 2, prompts_per_step: 3}\n"
    )
    run = tmp_path / "run"
    flags = {"model.path": model, "data.train_path": PROBLEMS, "train.output_dir": run}
    main([str(tmp_path / "mix.yaml"), *(part for k, v in flags.items() for part in (f"--{k}", str(v)))])
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert [row["num_kept"] for row in rows] == [6, 12]
    for row in rows:
        assert row["num_updates"] == 1 and row["grad_norm"] > 0
        assert row["mismatch_max"] < 1e-4
        assert row["num_kept_tokens"] == math.ceil(row["rho"] * row["num_scored_tokens"] - 1e-9)
        # The entropy of a random model over the real vocabulary is close to its largest value.
        assert math.log(151936) - 0.5 < row["entropy"] < math.log(151936)
