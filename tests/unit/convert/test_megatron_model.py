"""Our names are those of a real GPTModel, and with our weights it says what transformers says (faults B01, B08)."""

import json
import os
import subprocess
import sys
from pathlib import Path

from .builders import VARIANTS

ROOT = Path(__file__).parents[3]


def test_names_and_logits_of_every_family(tmp_path):
    command = [sys.executable, "-W", "ignore", "-m", "tests.unit.convert.megatron_forward", str(tmp_path / "store")]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert [row[0] for row in rows] == [family for family, _ in VARIANTS]
    for family, same_names, difference, largest in rows:
        assert same_names, family
        assert difference < 1e-5 and largest > 0.1, (family, difference, largest)
