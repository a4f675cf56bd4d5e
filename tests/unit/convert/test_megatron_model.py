"""Our names are those of a real GPTModel, and with our weights it says what transformers says (faults B01, B08)."""

import json

from ranks import run_ranks

from .builders import VARIANTS


def test_names_and_logits_of_every_family(tmp_path):
    done = run_ranks(["-m", "tests.unit.convert.megatron_forward", tmp_path / "store"])
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert [row[0] for row in rows] == [family for family, _ in VARIANTS]
    for family, same_names, difference, largest in rows:
        assert same_names, family
        assert difference < 1e-5 and largest > 0.1, (family, difference, largest)
