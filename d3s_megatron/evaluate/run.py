"""Evaluation of a model folder on sets of problems: generate what is missing, grade, count, write."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from d3s_megatron.data import encode_prompts, load_set
from d3s_megatron.evaluate import grading, tables, work
from d3s_megatron.evaluate.config import SETTINGS_FILE, Generating, Scoring
from d3s_megatron.evaluate.generations import FOLDER, Generation, Generations, by_problem, read_rows, write_whole
from d3s_megatron.evaluate.summary import Evaluation, summarise
from d3s_megatron.evaluate.world import World, join
from d3s_megatron.rewards import check_golds, make_reward
from d3s_megatron.rollout.make import make_engine
from d3s_megatron.types import Prompt

Say = Callable[[str], None]
SHOWN = 80  # characters of a prompt template on the screen


@dataclass(frozen=True)
class Job:
    """One call of the command."""

    generating: Generating
    scoring: Scoring
    data: Path
    sets: tuple[str, ...]
    num_samples: int
    limit: int | None  # first problems of each set; None: all
    chunk_size: int
    out: Path
    overwrite: bool = False  # what `out` holds of an earlier evaluation


def read_prompts(job: Job) -> dict[str, list[Prompt]]:
    """The prompts of every set; ValueError where a file, the template or the lengths are wrong."""
    from transformers import AutoConfig, AutoTokenizer

    folder = job.generating.model
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    prompts = {}
    for name in job.sets:
        prompts[name], _ = encode_prompts(load_set(job.data, name, job.limit), tokenizer, job.generating.data)
    positions = getattr(AutoConfig.from_pretrained(folder, local_files_only=True), "max_position_embeddings", None)
    longest, new = longest_prompt(prompts), job.generating.sampling.max_new_tokens
    if positions is not None and longest + new > positions:
        raise ValueError(
            f"--max-new-tokens {new}: with the longest prompt of {longest} tokens that is over the model's {positions} "
            f"positions; give at most {positions - longest}"
        )
    return prompts


def describe(job: Job, prompts: Mapping[str, Sequence[Prompt]]) -> str:
    """What will be done, in two lines."""
    how, sampling = job.generating, job.generating.sampling
    sets = ", ".join(f"{name} ({len(of_set)})" for name, of_set in prompts.items())
    return (
        f"{model_name(how.model)}: {sets}, {job.num_samples} answers a problem\n"
        f"temperature {sampling.temperature:g}, top-p {sampling.top_p:g}, top-k {sampling.top_k}, at most "
        f"{sampling.max_new_tokens} tokens, prompt template {_short(how.prompt_template)}, system prompt "
        f"{_short(how.system_prompt)}, {how.engine} in {how.dtype}"
    )


def _short(text: str | None) -> str:
    return repr(text) if text is None or len(text) <= SHOWN else f"{text[:SHOWN]!r}..."


def longest_prompt(prompts: Mapping[str, Sequence[Prompt]]) -> int:
    """Tokens of the longest prompt."""
    return max(len(prompt.token_ids) for of_set in prompts.values() for prompt in of_set)


def read_settings(folder: Path) -> dict[str, Any]:
    """What settings.json says; nothing where answers came from elsewhere."""
    path = folder / SETTINGS_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def check_settings(job: Job, settings: Mapping[str, Any]) -> None:
    """ValueError where the folder holds answers that were generated in another way."""
    path = job.out / SETTINGS_FILE
    if not path.exists():
        if (job.out / FOLDER).exists():
            raise ValueError(f"--out {job.out} holds generations without {SETTINGS_FILE}: give another folder")
        return
    before = read_settings(job.out)
    compared = [key for key in settings if key not in ("name", "scoring")]
    differ = [f"{k} {before.get(k)!r}, now {settings[k]!r}" for k in compared if before.get(k) != settings[k]]
    if differ:
        raise ValueError(
            f"--out {job.out} holds answers that were generated with {'; '.join(differ)}: put it back, give another "
            "--out, or --overwrite"
        )


def clear(folder: Path) -> None:
    """Removes what an earlier evaluation left in a folder, and nothing else."""
    for file in (folder / FOLDER).glob("*"):
        (folder / f"{file.name.partition('.')[0]}.json").unlink(missing_ok=True)
    for name in (FOLDER, grading.FOLDER):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in (SETTINGS_FILE, tables.CSV_FILE, tables.REPORT_FILE):
        (folder / name).unlink(missing_ok=True)


def evaluate_model(job: Job, prompts: Mapping[str, Sequence[Prompt]], say: Say) -> list[Evaluation]:
    """Generates what is missing, over all processes, and grades it on the first; empty on the others."""
    settings = {"name": model_name(job.generating.model)} | job.generating.settings()
    settings |= {"scoring": job.scoring.settings()}
    files = {name: Generations(job.out, name) for name in job.sets}
    if not job.overwrite:
        check_settings(job, settings)
        for name in job.sets:
            work.check_done(files[name], prompts[name], job.num_samples)
    world = join(needs_group=job.generating.engine == "vllm")
    try:
        world.meet()  # every process has looked at the folder as it was
        if world.rank == 0:
            make_reward(job.scoring.rewards).close()  # a wrong one shall not cost the answers of a night
            for note in bad_golds(job, prompts):
                say(f"note: {note}")
            if job.overwrite:
                clear(job.out)
            for name in job.sets:
                files[name].merge([prompt.id for prompt in prompts[name]])
            write_whole(job.out / SETTINGS_FILE, json.dumps(settings, indent=2) + "\n")
        world.meet()
        _generate(job, prompts, files, world, say)
        world.meet()
        if world.rank != 0:
            return []
        for name in job.sets:
            files[name].merge([prompt.id for prompt in prompts[name]])
    finally:
        world.close()
    return score(job.out, job.sets, job.scoring, job.out, job.num_samples, say)


def _generate(
    job: Job,
    prompts: Mapping[str, Sequence[Prompt]],
    files: Mapping[str, Generations],
    world: World,
    say: Say,
) -> None:
    chunks: list[work.Chunk] = []
    num_done = 0
    for name in job.sets:
        done = work.check_done(files[name], prompts[name], job.num_samples)
        num_done += len(done)
        chunks += work.pending(name, prompts[name], job.num_samples, job.generating.seed, job.chunk_size, done)
    num = sum(len(chunk.requests) for chunk in chunks)
    say(f"{num_done} answers are there, {num} to generate in {len(chunks)} chunks on {world.size} processes")
    if not chunks:
        return
    longest = longest_prompt(prompts) + job.generating.sampling.max_new_tokens
    engine = make_engine(job.generating.model, job.generating.rollout, longest, world.device)
    start, num_tokens = time.monotonic(), 0
    while (number := world.next_chunk()) < len(chunks):
        chunk = chunks[number]
        rollouts = engine.generate(chunk.requests, job.generating.sampling)
        rows = [Generation.new(rollout, sample) for rollout, sample in zip(rollouts, chunk.samples, strict=True)]
        files[chunk.set_name].write_chunk(chunk.number, rows)
        num_tokens += sum(row.num_tokens for row in rows)
        seconds = time.monotonic() - start
        say(
            f"  {chunk.set_name}: chunk {number + 1} of {len(chunks)} written, {seconds:.0f} s, "
            f"{num_tokens / seconds:.0f} tokens/s on this process"
        )
    engine.close()
    if world.size > 1:
        say("  nothing is left to hand out; waiting for the chunks of the other processes")


def _say_graded(say: Say, name: str, done: int, num: int) -> None:
    say(f"  {name}: {done} of {num} answers graded")


def score(
    folder: Path, sets: Sequence[str], scoring: Scoring, out: Path, num_samples: int | None, say: Say
) -> list[Evaluation]:
    """Grades folder/generations/SET.jsonl and writes every result into `out`; needs no model.

    `num_samples` counts only the first answers of each problem; None counts all.
    """
    problems = {}
    for name in sets:
        problems[name] = by_problem(read_rows(Generations(folder, name).path), name)
        if num_samples is not None and num_samples > len(problems[name][0]):
            raise ValueError(
                f"set {name}: {len(problems[name][0])} answers a problem are there, --samples asks for {num_samples}; "
                "with several nodes, --out must be on a file system that all of them share"
            )
        problems[name] = [row[:num_samples] for row in problems[name]]
        scoring.ks_for(len(problems[name][0]))
    evaluations = []
    with make_reward(scoring.rewards) as reward:
        for name in sets:
            answers = grading.grade(
                problems[name],
                reward,
                scoring.rewards,
                out / grading.FOLDER / f"{name}.jsonl",
                partial(_say_graded, say, name),
            )
            ks = scoring.ks_for(len(answers[0]))
            evaluations.append(summarise(name, answers, ks, scoring.seed, scoring.pass_kind))
    settings = read_settings(folder)
    settings.pop("scoring", None)
    model = settings.pop("name", folder.resolve().name)
    shown = settings | {"reward": scoring.rewards.kind} if settings else {}
    tables.write_results(out, evaluations, model, shown)
    return evaluations


def bad_golds(job: Job, prompts: Mapping[str, Sequence[Prompt]]) -> list[str]:
    """A line for each set with golds that do not parse, whose problems can never be solved."""
    if job.scoring.rewards.kind != "math_verify":
        return []
    notes = []
    for name, of_set in prompts.items():
        if ids := check_golds([(prompt.id, prompt.answer) for prompt in of_set], job.scoring.rewards):
            notes.append(f"{name}: {len(ids)} golds do not parse and are never solved: {', '.join(sorted(ids)[:5])}")
    return notes


def hints(evaluations: Sequence[Evaluation]) -> list[str]:
    """What the counts say about how the model was asked."""
    notes = []
    for one in evaluations:
        num = one.num_problems * one.num_samples
        if one.statuses["no_answer"] > num / 2:
            notes.append(
                f"{one.name}: {one.statuses['no_answer']} of {num} answers have no final answer in a \\boxed{{}}: ask "
                "for it (--system-prompt boxed, or examples in --prompt-template), or raise --max-new-tokens"
            )
        if one.cut_share > 0.1:
            notes.append(f"{one.name}: {100 * one.cut_share:.0f}% of the answers were cut: raise --max-new-tokens")
        if one.num_without_verdict:
            notes.append(f"{one.name}: {one.num_without_verdict} answers have no verdict: raise --deadline-seconds")
    return notes


def model_name(folder: str) -> str:
    """What a report calls a model: its folder, with the one above where many are called alike."""
    path = Path(folder).resolve()
    return f"{path.parent.name}/{path.name}" if path.name in ("export", "hf", "model") else path.name
