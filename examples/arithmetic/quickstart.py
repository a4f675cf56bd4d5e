"""The main job on a laptop: data, warm start, D3S on two processes with TP 2, and a model that answers.

python examples/arithmetic/quickstart.py --seed 0 --out runs/quickstart
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
SHOWN_PROBLEMS = 8


def run(title: str, *command: str | Path) -> None:
    """Runs one stage with its output on the terminal; ends with its exit code where it fails."""
    print(f"\n== {title}\n$ {' '.join(map(str, command))}", flush=True)
    # One thread a process: the model is tiny, and two processes share the cores.
    done = subprocess.run([str(part) for part in command], env=os.environ | {"OMP_NUM_THREADS": "1"})
    if done.returncode:
        sys.exit(done.returncode)


def answer(model_folder: Path, problems: list[dict[str, str]]) -> list[str]:
    """Greedy answers of the exported folder, by plain transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    answers = []
    for problem in problems:
        inputs = tokenizer(problem["problem"], return_tensors="pt", add_special_tokens=False)
        out = model.generate(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=6, do_sample=False
        )
        answers.append(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="seed of data, warm start and training (default 0)")
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart"), help="folder for everything written")
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers", help="of the rollouts")
    parser.add_argument("--steps", type=int, help="training steps (default: those of d3s.yaml)")
    args = parser.parse_args()
    width = ("--hidden-size", "128") if args.engine == "vllm" else ()  # vLLM's CPU attention wants heads of 32 or more
    steps = ("--train.steps", args.steps) if args.steps else ()
    python, out, start = sys.executable, args.out, time.perf_counter()
    if out.exists():
        shutil.rmtree(out)

    run("data", python, "-m", "d3s_megatron.data.arithmetic", "--out", out / "data", "--seed", args.seed)
    run(
        "supervised warm start",
        *(python, HERE / "warm_start.py", "--data", out / "data", "--out", out / "warm_start", "--seed", args.seed),
        *width,
    )
    run(
        "D3S",
        *(python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "d3s_megatron.train", HERE / "d3s.yaml"),
        *("--model.path", out / "warm_start"),
        *("--data.train_path", out / "data" / "train.jsonl", "--data.eval_path", out / "data" / "eval.jsonl"),
        *("--train.output_dir", out, "--train.seed", args.seed, "--rollout.engine", args.engine, *steps),
    )
    print("\n== the exported model, loaded by plain transformers, greedy")
    with (out / "data" / "eval.jsonl").open() as lines:
        problems = [json.loads(line) for _, line in zip(range(SHOWN_PROBLEMS), lines, strict=False)]
    answers = answer(out / "export", problems)
    for problem, text in zip(problems, answers, strict=True):
        verdict = "right" if text == problem["answer"] else f"wrong, {problem['answer']}"
        print(f"  {problem['problem']}{text:<6} {verdict}")
    summary = json.loads((out / "summary.json").read_text())
    print(
        f"\nheld-out accuracy {summary['accuracy_before']:.3f} -> {summary['accuracy_after']:.3f}, "
        f"pass@8 {summary['pass8_before']:.3f} -> {summary['pass8_after']:.3f}, "
        f"{summary['tokens_trained']} of {summary['tokens_generated']} generated tokens trained on, "
        f"{time.perf_counter() - start:.0f} s in all"
    )


if __name__ == "__main__":
    main()
