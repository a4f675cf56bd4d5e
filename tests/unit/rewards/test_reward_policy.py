"""Every row of the written policy is a case."""

import re
from pathlib import Path

import pytest

from d3s_megatron.rewards.math_judge import judge

POLICY = Path(__file__).parents[3] / "d3s_megatron" / "rewards" / "POLICY.md"
ROWS = re.findall(r"^\| `(.*)` \| `(.*)` \| (right|wrong) \|$", POLICY.read_text(encoding="utf-8"), re.MULTILINE)


def test_rows_are_found():
    num_lines = sum(line.startswith("| `") for line in POLICY.read_text(encoding="utf-8").splitlines())
    assert len(ROWS) == num_lines > 60


@pytest.mark.parametrize(("gold", "text", "verdict"), ROWS)
def test_row(gold, text, verdict):
    assert judge(text, gold)[0] == (verdict == "right")
