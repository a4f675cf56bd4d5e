"""Every example configuration parses, and says what its own header says."""

from pathlib import Path

import pytest
from helpers import ROOT

from d3s_megatron.config import parse_config

EXAMPLES = sorted((ROOT / "examples").glob("*/*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_a_whole_configuration(path: Path, tmp_path):
    config = parse_config([str(path), "--model.path", str(tmp_path), "--data.train_path", "problems.jsonl"])
    assert config.algorithm.name in ("d3s", "d3s-i")
    assert config.algorithm.kept_per_prompt_final == config.algorithm.samples_per_prompt


def test_there_are_examples():
    assert {"d3s", "qwen2.5-math-1.5b", "qwen2.5-math-7b", "llama-3.1-8b-instruct"} <= {p.stem for p in EXAMPLES}
