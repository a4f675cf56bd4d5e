"""Time and memory of a conversion against a plain copy of the same bytes and against transformers' load and save.

  python tools/bench_conversion.py [--work FOLDER] [--source HF_FOLDER] [--rounds 3] [--workers 2]

Without --source the checkpoint is random, with Qwen2.5-Math-1.5B's shape (3.09 GB in bfloat16). Every method runs in
a process of its own, from a source evicted from the page cache, and ends when its output is synced to disk. Starting
Python and importing torch and transformers is not counted (for transformers that is most of it), planning is.
"transformers" is AutoModelForCausalLM.from_pretrained(folder, dtype="auto").save_pretrained(out): what a converter
that goes through a model object does at least, before it has made a Megatron checkpoint of anything.

Right before each method `cp` copies the same source under the same conditions, since a disk's speed drifts: ratios to
cp are taken within such a pair, ratios to transformers within a round. The methods take turns at being the first of a
round. The table shows medians, and lowest and highest where it says range. Needs four times the source's disk.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from d3s_megatron.convert import expected_hf_names, hf_shape, read_shape, save_hf_folder
from d3s_megatron.convert.checkpoint import job, jobs
from d3s_megatron.convert.checkpoint.memory import AnonymousPeak

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "max_position_embeddings": 4096,
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
COPY = "cp"
TRANSFORMERS = "transformers load and save"
# name: (source folder, arguments of the layout); exports read what the import of the same layout wrote
METHODS = {
    "import TP1": ("hf", (1, 1)),
    "export TP1": ("import TP1", None),
    "import TP2 x PP2": ("hf", (2, 2)),
    "export TP2 x PP2": ("import TP2 x PP2", None),
    TRANSFORMERS: ("hf", None),
}


def make_source(folder: Path) -> None:
    """Write the random checkpoint."""
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "config.json").write_text(json.dumps(CONFIG))
        shape = read_shape(CONFIG)
        generator = torch.Generator().manual_seed(0)

        def tensors() -> Iterator[tuple[str, Tensor]]:
            for name in expected_hf_names(shape):
                bits = torch.randint(-(2**14), 2**14, hf_shape(shape, name), generator=generator, dtype=torch.int16)
                yield name, bits.view(torch.bfloat16)

        save_hf_folder(folder, shape, tensors(), scratch)


def evict(folder: Path) -> None:
    """Drop a folder's files from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def sync(folder: Path) -> None:
    """Wait until a folder's files are on disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


def convert(method: str, source: Path, out: Path, workers: int) -> None:
    """Do one method, synced to disk."""
    layout = METHODS.get(method, ("", None))[1]
    if method == COPY:
        subprocess.run(["cp", "-r", source, out], check=True)
        sync(out)
    elif method == TRANSFORMERS:
        from transformers import AutoModelForCausalLM

        AutoModelForCausalLM.from_pretrained(source, dtype="auto").save_pretrained(out)
        sync(out)
    elif layout:
        job.run(jobs.import_job(source, out, *layout), workers)
    else:
        job.run(jobs.export_job(source, out), workers)


def one(method: str, source: Path, out: Path, workers: int) -> None:
    """Run in a process of its own; prints what it took."""
    if method == TRANSFORMERS:
        import transformers  # noqa: F401  (its import is no part of the conversion)
    with AnonymousPeak() as memory:
        cpu, started = _cpu_seconds(), time.perf_counter()
        convert(method, source, out, workers)
        seconds, cpu = time.perf_counter() - started, _cpu_seconds() - cpu
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": seconds, "cpu": cpu, "anonymous": memory.peak, "resident": resident}))


def _cpu_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measure(method: str, source: Path, out: Path, workers: int) -> dict[str, float]:
    """One run from a cold source."""
    shutil.rmtree(out, ignore_errors=True)
    os.sync()
    evict(source)
    command = [sys.executable, __file__, "--one", method, str(source), str(out), "--workers", str(workers)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return json.loads(done.stdout.splitlines()[-1])


Runs = dict[str, list[tuple[dict[str, float], dict[str, float]]]]  # method -> (its figures, cp's) of every round


def one_round(source: Path, work: Path, workers: int, first: int, runs: Runs) -> None:
    """Measure every method once, beginning with number `first` of the layouts and transformers."""
    groups = [["import TP1", "export TP1"], ["import TP2 x PP2", "export TP2 x PP2"], [TRANSFORMERS]]
    order = groups[first % len(groups) :] + groups[: first % len(groups)]
    for name in [name for group in order for name in group]:
        reads = source if METHODS[name][0] == "hf" else work / METHODS[name][0]
        copy = measure(COPY, reads, work / COPY, workers)
        shutil.rmtree(work / COPY)
        ours = measure(name, reads, work / name, workers)
        runs[name].append((ours, copy))
        print(f"{name}: {ours['seconds']:.1f} s, cp {copy['seconds']:.1f} s", file=sys.stderr, flush=True)
        if not name.startswith("import"):
            shutil.rmtree(work / name)
    for name in METHODS:
        shutil.rmtree(work / name, ignore_errors=True)


def table(runs: Runs, nbytes: int, workers: int) -> str:
    """Markdown table of the medians."""

    def middle(values: list[float], digits: int = 2) -> str:
        low, high = min(values), max(values)
        return f"{statistics.median(values):.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"

    rounds = len(runs[TRANSFORMERS])
    lines = [
        f"{nbytes / 1e9:.2f} GB, {workers} workers, {os.cpu_count()} cores, median of {rounds} rounds, source evicted, "
        "output synced",
        "",
        "| method | s | cp s | time / cp (range) | times as fast as transformers (range) | GB/s | CPU s | cp CPU s "
        "| peak anonymous MB | peak resident MB |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, pairs in runs.items():

        def median(key: str, which: int = 0, pairs: list = pairs) -> float:
            return statistics.median(pair[which][key] for pair in pairs)

        slow = [pair[0]["seconds"] for pair in runs[TRANSFORMERS]]
        lines.append(
            f"| {name} | {median('seconds'):.1f} | {median('seconds', 1):.1f} "
            f"| {middle([mine['seconds'] / copy['seconds'] for mine, copy in pairs])} "
            f"| {middle([theirs / mine['seconds'] for theirs, (mine, _) in zip(slow, pairs, strict=True)])} "
            f"| {nbytes / 1e9 / median('seconds'):.2f} | {median('cpu'):.1f} | {median('cpu', 1):.1f} "
            f"| {median('anonymous') / 1e6:.0f} | {median('resident') / 1e6:.0f} |"
        )
    return "\n".join(lines)


def bench(source: Path, work: Path, rounds: int, workers: int) -> str:
    """Measure some rounds; returns the table."""
    runs: Runs = {name: [] for name in METHODS}
    for first in range(rounds):
        one_round(source, work, workers, first, runs)
    return table(runs, sum(path.stat().st_size for path in source.glob("*.safetensors")), workers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="folder on the disk to be measured (default: a temporary one)")
    parser.add_argument("--source", type=Path, help="convert this Hugging Face folder (default: a random checkpoint)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds (%(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="threads of our conversions (%(default)s)")
    parser.add_argument("--one", nargs=3, metavar=("METHOD", "SOURCE", "OUT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        method, source, out = options.one
        one(method, Path(source), Path(out), options.workers)
        return
    work = Path(tempfile.mkdtemp(dir=options.work, prefix="bench-conversion-"))
    try:
        if options.source is None:
            make_source(work / "hf")
        print(bench(options.source or work / "hf", work, options.rounds, options.workers))
    finally:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
