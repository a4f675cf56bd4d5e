"""The simulation of scale, at a size that takes a second: whole tables, exact counts, balance that gets better."""

import importlib
import json

import pytest
from helpers import ROOT


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("simulate_scale")


def test_a_step_is_simulated_and_said(tool, tmp_path, capsys):
    argv = ["--model", "Qwen2.5-Math-1.5B", "--ranks", "16", "--tokens", "2e5", "--longest", "1024", "--scores", "1e5"]
    assert tool.main([*argv, "--tp", "2", "--json", str(tmp_path / "found.json")]) in (0, 1)
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["ranks"], found["tp"], found["dp"]) == (16, 2, 8)
    assert found["kept_rollouts"] == found["rollouts"] * 20 // 32
    assert 1 <= found["after"]["cost"] < 1.05 < found["before"]["cost"]
    assert found["after"]["microbatches"] <= found["before"]["microbatches"]
    assert found["bytes"]["token ids and log-probs received"] < 8 * found["kept_tokens"]  # a share of them, not all
    said = capsys.readouterr().out
    assert all(part["name"] in said for part in found["parts"]) and "under 0.1%" in said


@pytest.mark.parametrize("ranks", [1, 7])
def test_the_top_share_over_threads_is_exact_and_sends_little(tool, ranks):
    run = tool.run_top_share(7_000, ranks, 0.25, seed=3)
    assert (run.num_scores, run.num_kept) == (7_000, 1_750)
    assert run.num_bytes <= run.rounds * 2 * 2048 * 8


def test_a_model_that_fits_nowhere_is_said(tool, capsys):
    assert tool.main(["--model", "Llama-3.1-70B", "--ranks", "8", "--tokens", "1e5"]) == 2
    assert "nothing fits 8 GPUs" in capsys.readouterr().err
