"""Which answers are still to be generated, in chunks that do not depend on who generates them.

Answers stand in a line: set after set, problem after problem, sample after sample. Every `chunk_size` of a set's are a
chunk, whatever the number of processes and however often the run was stopped; so a batch always holds the same answers,
and rounding, which depends on the batch, is the same too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from d3s_megatron.evaluate.generations import Generation, Generations, digest
from d3s_megatron.ops import mix64
from d3s_megatron.types import Prompt, Request

_SALT = 0x45564C31  # keeps these hashes apart from those of training


@dataclass(frozen=True)
class Chunk:
    """Answers that are generated and written together."""

    set_name: str
    number: int  # within the set
    requests: tuple[Request, ...]
    samples: tuple[int, ...]  # which of its problem's each request is


def seed_of(seed: int, set_name: str, id: str, sample: int) -> int:
    """Seed of one answer: a function of what it is, so that more samples or more problems leave it as it was."""
    name = int.from_bytes(hashlib.sha256(f"{set_name}\0{id}".encode()).digest()[:8], "little")
    return mix64(seed, name, sample, _SALT)


def pending(
    set_name: str,
    prompts: Sequence[Prompt],
    num_samples: int,
    seed: int,
    chunk_size: int,
    done: Mapping[tuple[str, int], Generation],
) -> list[Chunk]:
    """Chunks of a set with the answers that are not in `done`."""
    chunks = []
    num = len(prompts) * num_samples
    for number, first in enumerate(range(0, num, chunk_size)):
        places = [divmod(i, num_samples) for i in range(first, min(first + chunk_size, num))]
        missing = [(group, sample) for group, sample in places if (prompts[group].id, sample) not in done]
        requests = tuple(
            Request(
                group * num_samples + sample, group, prompts[group], seed_of(seed, set_name, prompts[group].id, sample)
            )
            for group, sample in missing
        )
        if missing:
            chunks.append(Chunk(set_name, number, requests, tuple(sample for _, sample in missing)))
    return chunks


def check_done(files: Generations, prompts: Sequence[Prompt], num_samples: int) -> dict[tuple[str, int], Generation]:
    """What a folder already holds of a set; ValueError where it does not belong to these problems and samples."""
    done = files.read()
    asked = {prompt.id: digest(prompt) for prompt in prompts}
    for (id, sample), row in done.items():
        what = f"{files.path}, or a part of it, holds "
        if id not in asked:
            raise ValueError(f"{what}problem {id}, which is not asked now: give a larger --limit, or another --out")
        if sample >= num_samples:
            raise ValueError(
                f"{what}sample {sample} of problem {id}, and --samples is {num_samples}: give at least {sample + 1} "
                "(--regrade counts fewer of them), or another --out"
            )
        if row.prompt != asked[id]:
            raise ValueError(
                f"{what}problem {id} with another prompt or gold than now: put data and prompt options back as they "
                "were, or give another --out"
            )
    return done
