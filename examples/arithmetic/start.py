"""What every run of a seed starts from: the data, the warm start, and start.yaml that names them to the trainer.

`python -m d3s_megatron.ablate --config examples/arithmetic/ablation.yaml` calls it once a seed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import yaml
from warm_start import warm_start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, required=True, help="seed of data, first weights and warm start")
    parser.add_argument("--out", type=Path, required=True, help="folder for data/, model/ and start.yaml")
    args = parser.parse_args()
    out = args.out.resolve()
    data, model = out / "data", out / "model"
    command = (sys.executable, "-m", "d3s_megatron.data.arithmetic", "--out", data, "--seed", args.seed)
    subprocess.run([str(part) for part in command], check=True)
    accuracy = warm_start(data, model, args.seed, target=0.30, steps=1000)
    print(f"seed {args.seed}: held-out accuracy at the start {accuracy:.3f}", flush=True)
    settings = {
        "model": {"path": str(model)},
        "data": {"train_path": str(data / "train.jsonl"), "eval_path": str(data / "eval.jsonl")},
    }
    (out / "start.yaml").write_text(yaml.safe_dump(settings))


if __name__ == "__main__":
    main()
