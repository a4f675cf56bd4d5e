"""Tokens per second of the rollout engines, and seconds and bytes of a weight sync, on a random model of your size.

    python tools/bench_rollouts.py --engines transformers vllm server --hidden 128 --layers 2

"server" is engines of the first other kind given, behind rollout servers in processes of their own: a row for each
number of --servers and each of --transports, by which weights get there. Every engine gets the same prompts and seeds;
the first call is not counted. Rows that are run beside other work show it: take the ratio of two rows of one run, not
of two runs.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from d3s_megatron.convert import HFFolder, read_shape
from d3s_megatron.rollout import RolloutConfig, RolloutEngine, Sampling, make_requests
from d3s_megatron.rollout.make import make_engine
from d3s_megatron.rollout.server_engine import ServerEngine
from d3s_megatron.types import Prompt


def build_model(folder: Path, args: argparse.Namespace) -> Path:
    """A random Qwen2 whose answers nearly always run to the limit, with a tokenizer of one id a character."""
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // args.head_size,
        num_key_value_heads=max(1, args.hidden // args.head_size // 2),
        max_position_embeddings=args.prompt + args.tokens,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        dtype=args.dtype,
    )
    Qwen2ForCausalLM(config).to(getattr(torch, args.dtype)).save_pretrained(folder)
    vocab = {"<end>": 0} | {chr(0x4E00 + i): i for i in range(1, args.vocab)}
    Qwen2Tokenizer(vocab=vocab, merges=[], unk_token="<end>", eos_token="<end>", pad_token="<end>").save_pretrained(
        folder
    )
    return folder


@contextmanager
def servers_of(model: Path, args: argparse.Namespace) -> Iterator[list[str]]:
    """The addresses of as many rollout servers as any row wants, and their end."""
    behind = next(name for name in args.engines if name != "server")
    command = [
        *(sys.executable, "-m", "d3s_megatron.rollout.serve", "--model", model, "--engine", behind, "--port", "0"),
        *("--max-batch-size", args.batch, "--dtype", args.dtype, "--device", args.device),
        *("--memory-share", args.memory_share),
    ]
    running = [
        subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, text=True, env=os.environ)
        for _ in range(max(args.servers))
    ]
    try:
        yield [next(line.split()[-1] for line in process.stdout if line.startswith("serving ")) for process in running]
    finally:
        for process in running:
            process.terminate()
            process.wait()


def measure(engine: RolloutEngine, model: Path, args: argparse.Namespace) -> tuple[float, float, int]:
    """(tokens per second, seconds of a weight sync, bytes of the weights), each the best of `args.repeats`."""
    source, shape = HFFolder(model), read_shape(model)
    weights = list(source.tensors(shape))
    generator = torch.Generator().manual_seed(1)
    prompts = [
        Prompt(str(i), "", tuple(torch.randint(1, args.vocab, (args.prompt,), generator=generator).tolist()), "")
        for i in range(args.prompts)
    ]
    sampling, speeds, syncs = Sampling(max_new_tokens=args.tokens), [], []
    for repeat in range(args.repeats + 1):
        start = time.perf_counter()
        engine.load_weights(iter(weights))
        middle = time.perf_counter()
        rollouts = engine.generate(make_requests(prompts, args.samples, 0, repeat), sampling)
        if repeat:
            syncs.append(middle - start)
            speeds.append(sum(len(r.token_ids) for r in rollouts) / (time.perf_counter() - middle))
    return max(speeds), min(syncs), sum(tensor.nbytes for _, tensor in weights)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", nargs="+", default=["transformers"], choices=("transformers", "vllm", "server"))
    ways = ("http", "folder", "broadcast")
    parser.add_argument("--transports", nargs="+", default=["http"], choices=ways, help="of weights to servers")
    parser.add_argument("--servers", nargs="+", type=int, default=[1], help="numbers of rollout servers (default 1)")
    for name, value, text in (
        ("hidden", 128, "hidden units"),
        ("head-size", 32, "units of an attention head"),
        ("layers", 2, "layers"),
        ("vocab", 4096, "rows of the embedding"),
        ("prompts", 16, "prompts"),
        ("samples", 8, "answers a prompt"),
        ("prompt", 32, "tokens of a prompt"),
        ("tokens", 64, "tokens of an answer"),
        ("batch", 512, "answers decoded at once"),
        ("repeats", 3, "counted calls, of which the best is shown"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{text} (default {value})")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--memory-share", type=float, default=0.4, help="of the device, for vLLM (default 0.4)")
    args = parser.parse_args()
    if args.engines == ["server"]:
        parser.error("server needs the engine behind it: --engines vllm server")
    config = RolloutConfig(dtype=args.dtype, max_batch_size=args.batch, vllm_memory_share=args.memory_share)
    with tempfile.TemporaryDirectory() as folder:
        model = build_model(Path(folder) / "model", args)
        print(
            f"{args.prompts * args.samples} answers of {args.tokens} tokens, {args.layers} layers of {args.hidden}, "
            f"vocabulary {args.vocab}, {args.dtype}, {torch.get_num_threads()} threads\n"
            f"{'engine':<22}{'tokens/s':>10}{'sync s':>9}{'MB':>8}{'MB/s':>8}",
            flush=True,
        )
        for kind in (kind for kind in args.engines if kind != "server"):
            settings = replace(config, engine=kind)
            with closing(make_engine(model, settings, args.prompt + args.tokens, args.device, colocated=False)) as one:
                show(kind, *measure(one, model, args))
        if "server" in args.engines:
            with servers_of(model, args) as addresses, tempfile.TemporaryDirectory() as sync_folder:
                for number, transport in itertools.product(args.servers, args.transports):
                    way = {"weight_transport": transport, "sync_folder": sync_folder}
                    settings = replace(config, engine="server", servers=",".join(addresses[:number]), **way)
                    with closing(ServerEngine(model, settings, args.prompt + args.tokens)) as one:
                        show(f"{number} server{'s' * (number > 1)}, {transport}", *measure(one, model, args))


def show(name: str, speed: float, seconds: float, num_bytes: int) -> None:
    """A row of the table."""
    megabytes = num_bytes / 1e6
    print(f"{name:<22}{speed:>10.0f}{seconds:>9.3f}{megabytes:>8.1f}{megabytes / seconds:>8.0f}", flush=True)


if __name__ == "__main__":
    main()
