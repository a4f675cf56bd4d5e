"""A real trained model on real problems (tools/evaluate_smollm2.py), where its packages are installed."""

import importlib
import json

import pytest
from helpers import ROOT, SHARED

from d3s_megatron.evaluate.__main__ import main

DATA = SHARED / "data"


def test_smollm2_on_gsm8k(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    tool = importlib.import_module("evaluate_smollm2")
    if tool.gguf_file() is None:
        pytest.skip(tool.ABSENT)
    if not DATA.is_dir():
        pytest.skip("no evaluation sets in a shared folder beside the project")
    assert tool.main([str(tmp_path), "--data", str(DATA), "--limit", "3", "--max-new-tokens", "48"]) == 0
    out = tmp_path / "gsm8k"
    found = json.loads((out / "gsm8k.json").read_text())
    assert (found["num_problems"], found["num_samples"]) == (3, 2)
    texts = [json.loads(line)["text"] for line in (out / "generations" / "gsm8k.jsonl").open()]
    assert len(texts) == 6 and all(len(text.split()) > 10 for text in texts)  # it speaks
    before = (out / "gsm8k.json").read_bytes(), (out / "graded" / "gsm8k.jsonl").read_bytes()
    assert main(["--regrade", str(out)]) == 0
    assert before == ((out / "gsm8k.json").read_bytes(), (out / "graded" / "gsm8k.jsonl").read_bytes())
