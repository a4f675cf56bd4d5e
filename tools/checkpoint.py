"""Convert, verify and inspect checkpoints: Hugging Face folders <-> megatron-core distributed checkpoints.

  python tools/checkpoint.py import  Qwen/folder out --tp 2 --pp 2     Hugging Face -> Megatron (torch_dist)
  python tools/checkpoint.py export  out exported                      Megatron -> Hugging Face
  python tools/checkpoint.py verify  Qwen/folder exported              bit for bit, whatever the format
  python tools/checkpoint.py plan    Qwen/folder --tp 2                what it will take, from headers alone
  python tools/checkpoint.py inspect out                               what is in it

No GPU, no process group and no model object is needed (verify --logits alone builds the two models). A run that was
killed continues when the same command is given again.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from pathlib import Path

from d3s_megatron.convert.checkpoint import compare, describe, job, jobs
from d3s_megatron.convert.checkpoint.sizes import parse_size, size_text
from d3s_megatron.convert.checkpoint.torch_dist import is_dist_checkpoint
from d3s_megatron.convert.hf_writer import DEFAULT_SHARD_BYTES
from d3s_megatron.convert.shape import DTYPES

SECONDS_BETWEEN_LINES = 5  # of progress


def main(arguments: list[str] | None = None) -> int:
    """Run one command; 0 where it worked, 1 where verify found a difference, 2 for a wrong input."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped: the same command continues where it was", file=sys.stderr)
        return 130


class _Progress:
    """Prints how far a conversion is, at most every few seconds."""

    def __init__(self) -> None:
        self.started = self.printed = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self.printed >= SECONDS_BETWEEN_LINES:
            self.printed = now
            print(
                f"{size_text(done)} of {size_text(total)} after {now - self.started:.0f} s", file=sys.stderr, flush=True
            )


def _import(options: argparse.Namespace) -> int:
    if is_dist_checkpoint(options.source):
        raise ValueError(f"{options.source} is a Megatron checkpoint: use export, or give a Hugging Face folder")
    _plan_of(options).check()
    planned = jobs.import_job(
        options.source, options.out, options.tp, options.pp, options.vpp, options.vocab_multiple, _dtype(options)
    )
    print(job.run(planned, options.workers, not options.buffered, _Progress()))
    return 0


def _export(options: argparse.Namespace) -> int:
    if (Path(options.source) / "config.json").is_file():
        raise ValueError(f"{options.source} is a Hugging Face folder: use import, or give a Megatron checkpoint")
    _plan_of(options).check()
    planned = jobs.export_job(options.source, options.out, options.hf, options.max_shard_bytes, _dtype(options))
    print(job.run(planned, options.workers, not options.buffered, _Progress()))
    return 0


def _verify(options: argparse.Namespace) -> int:
    (shape, ours), (other, theirs) = (jobs.blocks_of(folder, options.hf) for folder in (options.first, options.second))
    digests = compare.digests(shape, ours, options.workers)
    lines = compare.differences(digests, compare.digests(other, theirs, options.workers))
    if options.hashes:
        for name, digest in digests.items():
            print(f"{digest.hexdigest}  {name}")
    for line in lines:
        print(line)
    print(f"{len(digests)} tensors: " + (f"{len(lines)} differ" if lines else "equal bit for bit"))
    if options.logits:
        warnings.simplefilter("ignore")  # megatron-core's import names what it lacks without a GPU
        from checkpoint_logits import compare_logits  # the only part that needs megatron-core and transformers

        difference = compare_logits(Path(options.first), Path(options.second), options.hf)
        close = difference <= options.tolerance
        print(f"logits: largest difference {difference:.3g}, {'within' if close else 'beyond'} {options.tolerance:g}")
        return int(bool(lines) or not close)
    return int(bool(lines))


def _plan(options: argparse.Namespace) -> int:
    plan = _plan_of(options)
    print(plan)
    plan.check()
    return 0


def _inspect(options: argparse.Namespace) -> int:
    print(describe.inspect(options.source, options.hf))
    return 0


def _plan_of(options: argparse.Namespace) -> describe.Plan:
    return describe.plan_conversion(
        options.source,
        options.out,
        getattr(options, "tp", 1),
        getattr(options, "pp", 1),
        getattr(options, "vpp", 1),
        getattr(options, "vocab_multiple", 128),
        options.workers,
        _dtype(options),
        getattr(options, "max_shard_bytes", DEFAULT_SHARD_BYTES),
        getattr(options, "hf", None),
    )


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _dtype(options: argparse.Namespace):
    return DTYPES[options.dtype] if options.dtype else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="checkpoint.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run, text: str, *parts) -> None:
        sub = commands.add_parser(name, help=text, description=text)
        for part in parts:
            part(sub)
        sub.set_defaults(run=run)

    command("import", _import, "Hugging Face folder -> Megatron checkpoint", _source_and_out, _layout, _common, _how)
    command(
        "export", _export, "Megatron checkpoint -> Hugging Face folder", _source_and_out, _hf, _shards, _common, _how
    )
    command("verify", _verify, "compare two checkpoints of either kind bit for bit", _two, _hf)
    plan = "say what an import (of a Hugging Face folder) or export (of a Megatron one) needs; nothing is written"
    command("plan", _plan, plan, _source, _out, _layout, _hf, _shards, _common)
    command("inspect", _inspect, "say what a checkpoint holds", _source, _hf)
    return parser


def _source(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("source", metavar="CHECKPOINT", help="Hugging Face folder or Megatron (torch_dist) folder")


def _out(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--out", help="where it would go: the free space of that disk counts, not of the source's")


def _source_and_out(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("source", metavar="FROM", help="folder to read; it is never changed")
    sub.add_argument("out", metavar="OUT", help="folder to write; it must not exist, and appears only when complete")


def _two(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("first", metavar="A", help="Hugging Face or Megatron folder")
    sub.add_argument("second", metavar="B", help="Hugging Face or Megatron folder")
    sub.add_argument("--hashes", action="store_true", help="print the BLAKE2b hash of every tensor of A")
    sub.add_argument("--logits", action="store_true", help="also compare transformers' logits with Megatron's")
    sub.add_argument("--tolerance", type=float, default=1e-4, help="largest allowed logit difference (%(default)g)")
    sub.add_argument("--workers", type=int, default=2, help="threads (%(default)s)")


def _layout(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--tp",
        type=int,
        default=1,
        help="tensor-parallel ranks that will read it (%(default)s); any number can, these read one file each",
    )
    sub.add_argument("--pp", type=int, default=1, help="pipeline stages that will read it (%(default)s); likewise")
    sub.add_argument("--vpp", type=int, default=1, help="virtual chunks of each stage (%(default)s)")
    sub.add_argument(
        "--vocab-multiple",
        type=int,
        default=128,
        help="the vocabulary is padded to a multiple of this times TP (%(default)s)",
    )


def _hf(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--hf", help="folder with config.json and tokenizer, where the Megatron checkpoint carries none")


def _shards(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--max-shard-bytes",
        type=_size,
        default=DEFAULT_SHARD_BYTES,
        metavar="SIZE",
        help=f"largest safetensors file of an export, like 500MB (default: {size_text(DEFAULT_SHARD_BYTES)})",
    )


def _common(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--dtype", choices=sorted(DTYPES), help="convert to this type; without it the type is kept")
    sub.add_argument("--workers", type=int, default=2, help="threads (%(default)s, which keep a disk busy)")


def _how(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--buffered",
        action="store_true",
        help="move the bytes through the page cache, as cp does: slower, but what is written stays in memory, and for "
        "file systems on which direct access is slow",
    )


if __name__ == "__main__":
    sys.exit(main())
