"""Evaluate a model folder: unbiased pass@k and maj@k with intervals, lengths, cut answers, status counts.

  python -m d3s_megatron.evaluate --model FOLDER --sets aime24,gsm8k --samples 32 --data data --out runs/eval/NAME
  torchrun --nproc-per-node 8 -m d3s_megatron.evaluate ...      the same files, sooner
  python -m d3s_megatron.evaluate --regrade runs/eval/NAME      grade what is there again, without a model

The same command goes on after a stop, also with another number of processes. In the output folder: report.md,
summary.csv, SET.json, generations/SET.jsonl (the answers) and graded/SET.jsonl (their verdicts).
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.errors import record
from transformers.utils.logging import disable_progress_bar

from d3s_megatron.data.sets import NUM_PROBLEMS
from d3s_megatron.evaluate import run
from d3s_megatron.evaluate.config import BOXED, PASS_AT, Generating, Scoring, recommended_sampling
from d3s_megatron.evaluate.estimators import CONFIDENCE
from d3s_megatron.evaluate.generations import FOLDER as GENERATIONS
from d3s_megatron.evaluate.grading import FOLDER as GRADED
from d3s_megatron.evaluate.summary import Evaluation
from d3s_megatron.evaluate.tables import CSV_FILE, REPORT_FILE, screen
from d3s_megatron.launch import say_error
from d3s_megatron.rewards import RewardConfig
from d3s_megatron.rollout import Sampling

CHUNKS = {"transformers": 1, "vllm": 8}  # batches in a chunk: vLLM refills its batch, and idles at a chunk's end
BATCH = {"transformers": 64, "vllm": 256}


def make_parser() -> argparse.ArgumentParser:
    """Every option, with what it means."""
    parser = argparse.ArgumentParser(
        prog="python -m d3s_megatron.evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", metavar="FOLDER", help="Hugging Face folder: config.json, weights and tokenizer")
    add(
        "--sets", help=f"names with commas between (default: {','.join(NUM_PROBLEMS)}); any NAME.jsonl in --data is one"
    )
    add("--samples", type=int, help="answers a problem (default 32; with --regrade: all that are there)")
    add("--data", metavar="FOLDER", type=Path, default=Path("data"), help="holds NAME.jsonl, or eval/NAME.jsonl (data)")
    add("--out", metavar="FOLDER", type=Path, help="for all files (default runs/evaluate/MODEL; --regrade: its folder)")
    add("--regrade", metavar="FOLDER", type=Path, help="grade an earlier output folder again; no model is loaded")
    add("--overwrite", action="store_true", help="throw away what --out holds of an earlier evaluation")
    add("--limit", type=int, help="only the first problems of each set")

    asking = parser.add_argument_group("how the model is asked")
    add = asking.add_argument
    add("--prompt-template", default="chat", help="chat, raw, or a text that contains {problem} (chat)")
    add("--system-prompt", help=f"system message of the chat template; boxed is short for {BOXED!r}".replace("%", "%%"))
    add("--temperature", type=float, help="0 is greedy (default: the model's generation_config.json, else 1)")
    add("--top-p", type=float, help="1 is off (default: the model's generation_config.json, else 1)")
    add("--top-k", type=int, help="0 is off (default: the model's generation_config.json, else 0)")
    add("--max-new-tokens", type=int, default=2048, help="longest answer, end-of-sequence included (2048)")
    add("--seed", type=int, help="of sampling and of the bootstrap (0)")

    engine = parser.add_argument_group("engine")
    add = engine.add_argument
    add(
        "--engine", choices=("transformers", "vllm"), default="transformers", help="one engine a process (transformers)"
    )
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="of weights (bfloat16 with CUDA, else float32)")
    add("--batch-size", type=int, help="answers decoded at once in a process (64; vllm 256)")
    add("--chunk-size", type=int, help="answers written at once, which a stop may lose (64; vllm 2048)")
    add("--memory-share", type=float, help="of the device, for vllm (0.85; 0.4 on a CPU, which processes share)")

    grading = parser.add_argument_group("grading and counting (--regrade takes the earlier choices by default)")
    add = grading.add_argument
    add("--reward", help="math_verify, exact, or module:function (math_verify)")
    add("--num-workers", type=int, default=os.cpu_count() or 1, help="worker processes that grade (one a core)")
    add("--deadline-seconds", type=float, default=RewardConfig.deadline_seconds, help="for one answer (5)")
    add("--memory-limit-mb", type=int, default=RewardConfig.memory_limit_mb, help="of one worker (2048)")
    add(
        "--k", help=f"of pass@k and maj@k, with commas between (default: {','.join(map(str, PASS_AT))} up to --samples)"
    )
    add(
        "--pass-kind",
        choices=("unbiased", "first"),
        help="over all draws of k answers, or over the first k only (unbiased)",
    )
    return parser


def _positive(options: argparse.Namespace) -> None:
    for name in ("samples", "limit", "batch_size", "chunk_size", "num_workers"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {value}: it must be at least 1")


def _scoring(options: argparse.Namespace) -> Scoring:
    before = run.read_settings(options.regrade) if options.regrade is not None else {}
    chosen = before.get("scoring", {}) | {"seed": before.get("seed", 0)}
    given = {name: getattr(options, name) for name in ("reward", "k", "pass_kind", "seed")}
    chosen = {"reward": RewardConfig.kind, "k": None, "pass_kind": "unbiased"} | chosen
    chosen |= {name: value for name, value in given.items() if value is not None}
    ks = None
    if chosen["k"] is not None:
        if not re.fullmatch(r"\d+(,\d+)*", chosen["k"]):
            raise ValueError(f"--k is {chosen['k']!r}: give whole numbers with commas between, as in 1,8,32")
        ks = tuple(map(int, chosen["k"].split(",")))
    rewards = RewardConfig(
        kind=chosen["reward"],
        num_workers=options.num_workers,
        deadline_seconds=options.deadline_seconds,
        memory_limit_mb=options.memory_limit_mb,
    )
    return Scoring(rewards, ks, chosen["pass_kind"], chosen["seed"])


def _job(options: argparse.Namespace, scoring: Scoring) -> run.Job:
    if not (Path(options.model) / "config.json").is_file():
        raise ValueError(f"--model is {options.model!r}, which has no config.json: give a local Hugging Face folder")
    given = {name: getattr(options, name) for name in ("temperature", "top_p", "top_k")}
    chosen = recommended_sampling(options.model) | {k: v for k, v in given.items() if v is not None}
    batch_size = options.batch_size or BATCH[options.engine]
    generating = Generating(
        model=options.model,
        engine=options.engine,
        dtype=options.dtype or ("bfloat16" if torch.cuda.is_available() else "float32"),
        sampling=Sampling(max_new_tokens=options.max_new_tokens, **chosen),
        seed=options.seed or 0,
        prompt_template=options.prompt_template,
        system_prompt=BOXED if options.system_prompt == "boxed" else options.system_prompt,
        batch_size=batch_size,
        memory_share=options.memory_share or (0.85 if torch.cuda.is_available() else 0.4),
    )
    num_samples = options.samples or 32
    scoring.ks_for(num_samples)
    return run.Job(
        generating=generating,
        scoring=scoring,
        data=options.data,
        sets=_names(options.sets) or tuple(NUM_PROBLEMS),
        num_samples=num_samples,
        limit=options.limit,
        chunk_size=options.chunk_size or CHUNKS[options.engine] * batch_size,
        overwrite=options.overwrite and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0",
        out=options.out or Path("runs") / "evaluate" / run.model_name(options.model),
    )


def _names(sets: str | None) -> tuple[str, ...]:
    names = tuple(name.strip() for name in (sets or "").split(",") if name.strip())
    if bad := [name for name in names if not re.fullmatch(r"[\w-]+", name)]:
        raise ValueError(f"--sets names {bad[0]!r}: a set is called by letters, digits, - and _")
    if len(set(names)) < len(names):
        raise ValueError(f"--sets names a set twice: {','.join(names)}")
    return tuple(sorted(names, key=_place))  # one order for all tables, whatever was typed


def _regrade(options: argparse.Namespace, scoring: Scoring) -> tuple[list[Evaluation], Path]:
    folder = options.regrade / GENERATIONS
    there = tuple(sorted((path.stem for path in folder.glob("*.jsonl")), key=_place))
    sets = _names(options.sets) or there
    missing = [name for name in sets if name not in there]
    if missing or not there:
        what = f"no {missing[0]}.jsonl" if missing else "no .jsonl file"
        raise ValueError(f"--regrade: {what} in {folder}; give a folder that an evaluation wrote to its end")
    out = options.out or options.regrade
    return run.score(options.regrade, sets, scoring, out, options.samples, _say), out


def _place(name: str) -> tuple[int, str]:
    known = list(NUM_PROBLEMS)
    return known.index(name) if name in known else len(known), name


def _say(text: str) -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        print(text, flush=True)


def _run(options: argparse.Namespace) -> int:
    _positive(options)
    scoring = _scoring(options)
    if options.regrade is not None:
        evaluations, out = _regrade(options, scoring)
    elif options.model is None:
        raise ValueError("give --model FOLDER, or --regrade FOLDER for answers that are there already")
    else:
        job = _job(options, scoring)
        prompts = run.read_prompts(job)
        _say(run.describe(job, prompts))
        evaluations, out = run.evaluate_model(job, prompts, _say), job.out
    if not evaluations:
        return 0  # the first process has the results
    _say(f"\nin percent, with {100 * CONFIDENCE:.0f}% bootstrap intervals over the problems\n")
    _say(screen(evaluations) + "\n")
    for note in run.hints(evaluations):
        _say(f"note: {note}")
    names = ",".join(one.name for one in evaluations)
    many = f"{{{names}}}" if len(evaluations) > 1 else names
    _say(f"{out / REPORT_FILE} (with the paper's numbers beside), {CSV_FILE}, {many}.json, {GENERATIONS}/, {GRADED}/")
    return 0


def main(argv: Sequence[str]) -> int:
    """The command line; exit code 2 and one line where something is wrong, 130 where it was interrupted."""
    options = make_parser().parse_args(argv)
    disable_progress_bar()
    rewards = logging.getLogger("d3s_megatron.rewards")
    level = rewards.level
    try:
        rewards.setLevel(logging.ERROR)  # whole sets may go unsolved; the table says it
        return _run(options)
    except (ValueError, OSError) as wrong:
        say_error(as_options(str(wrong)))
        return 2
    except KeyboardInterrupt:
        _say("\ninterrupted; the same command goes on from the last chunk that was written")
        return 130
    finally:
        rewards.setLevel(level)


def as_options(text: str) -> str:
    """Names of a training configuration's fields in an error as the options that they are here."""
    fields = r"\b(?:data|rollout)\.(prompt_template|system_prompt|max_new_tokens|engine|dtype)\b"
    text = re.sub(fields, lambda match: "--" + match[1].replace("_", "-"), text)
    return re.sub(r"\brewards\.(kind|num_workers|deadline_seconds|memory_limit_mb)\b", _reward_option, text)


def _reward_option(match: re.Match[str]) -> str:
    return "--reward" if match[1] == "kind" else "--" + match[1].replace("_", "-")


if __name__ == "__main__":
    sys.exit(record(main)(sys.argv[1:]))
