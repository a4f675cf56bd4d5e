"""Runs the quickstart for several seeds and prints its figures as a Markdown table.

python tools/measure_quickstart.py --seeds 5 --out runs/measure
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean

QUICKSTART = Path(__file__).resolve().parent.parent / "examples" / "arithmetic" / "quickstart.py"


def measure(seed: int, out: Path) -> dict[str, float]:
    """The summary of one run, and its wall seconds from data to export."""
    start = time.perf_counter()
    subprocess.run([sys.executable, QUICKSTART, "--seed", str(seed), "--out", out], check=True, capture_output=True)
    return json.loads((out / "summary.json").read_text()) | {"seconds_in_all": time.perf_counter() - start}


def row(name: str, values: list[float], form: str) -> str:
    """One line of the table."""
    return f"| {name} | " + " | ".join(form % f(values) for f in (mean, min, max)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5, help="seeds 0 to N-1 (default 5)")
    parser.add_argument("--out", type=Path, default=Path("runs/measure"), help="folder for the runs")
    args = parser.parse_args()
    runs = [measure(seed, args.out / f"seed{seed}") for seed in range(args.seeds)]
    lines = ["| | mean | minimum | maximum |", "|---|---|---|---|"]
    lines.append(row("accuracy before", [r["accuracy_before"] for r in runs], "%.3f"))
    lines.append(row("accuracy after", [r["accuracy_after"] for r in runs], "%.3f"))
    lines.append(row("gain", [r["accuracy_after"] - r["accuracy_before"] for r in runs], "%.3f"))
    lines.append(row("pass@8 before", [r["pass8_before"] for r in runs], "%.3f"))
    lines.append(row("pass@8 after", [r["pass8_after"] for r in runs], "%.3f"))
    share = [r["tokens_trained"] / r["tokens_generated"] for r in runs]
    lines.append(row("tokens trained / generated", share, "%.3f"))
    lines.append(row("seconds of D3S", [r["train_seconds"] for r in runs], "%.0f"))
    lines.append(row("seconds in all, warm start included", [r["seconds_in_all"] for r in runs], "%.0f"))
    print("\n".join(lines))
    (args.out / "measured.json").write_text(json.dumps(runs, indent=2) + "\n")


if __name__ == "__main__":
    main()
