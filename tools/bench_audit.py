"""What the audit costs a training step: the same run with and without it, turn by turn, in processor and wall seconds.

    python tools/bench_audit.py CONFIG.yaml [--section.key VALUE ...] [--pairs 3]

Steps are the same, as the audit changes nothing of them; the first step of each run is left out (imports, tokenizer).
Processor seconds are those of the training process with all its threads, the audit's own thread among them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

OFF = ("--audit.every", "0", "--audit.rollouts", "none")
FIXED = ("--train.export", "false", "--checkpoint.every", "0", "--data.eval_path", "")


def steps_of(args: list[str], out: Path) -> list[dict[str, float]]:
    """Trains once and returns the log's rows but the first."""
    command = [sys.executable, "-m", "d3s_megatron.train", *args, *FIXED, "--train.output_dir", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [row for row in rows if "progress" in row][1:]


def main() -> None:
    """Prints one row a kind of seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3, help="runs of each kind (3)")
    options, args = parser.parse_known_args()
    with_audit: list[dict[str, float]] = []
    without: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        for pair in range(options.pairs):
            with_audit += steps_of(args, Path(folder) / f"on-{pair}")
            without += steps_of([*args, *OFF], Path(folder) / f"off-{pair}")
        files = [path.stat().st_size for path in (Path(folder) / "on-0" / "audit").iterdir()]
        saved = [path.stat().st_size for path in (Path(folder) / "on-0" / "rollouts").iterdir()]
    for name, heading in (("time/cpu", "processor"), ("time/step", "wall")):
        on, off = (statistics.median(row[name] for row in rows) for rows in (with_audit, without))
        print(f"{heading:<10} median s a step: {on:.4f} with, {off:.4f} without, {100 * (on / off - 1):+.1f}%")
    own = statistics.median(row["time/audit"] / row["time/step"] for row in with_audit)
    print(f"time/audit / time/step, median: {100 * own:.2f}%")
    print(f"bytes a step: audit {statistics.mean(files):.0f}, rollouts {statistics.mean(saved):.0f}")


if __name__ == "__main__":
    main()
