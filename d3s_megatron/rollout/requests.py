"""From the prompts of a batch to the requests of a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from d3s_megatron.ops import mix64
from d3s_megatron.types import Prompt, Request

_SALT = 0x524F4C4C  # keeps these hashes apart from the tie keys, which come from the same (seed, step, uid)


def make_requests(
    prompts: Sequence[Prompt], num_samples: int, seed: int, step: int, first_group: int = 0
) -> list[Request]:
    """`num_samples` requests for each prompt, prompt by prompt; uid is group_id * num_samples + sample.

    A rank that holds a share of the batch passes the slot of its first prompt as `first_group`; uids and seeds are
    then those that one rank alone would have given.
    """
    first = first_group * num_samples
    uids = range(first, first + len(prompts) * num_samples)
    seeds = mix64(seed, step, torch.tensor(uids, dtype=torch.int64), _SALT).tolist() if uids else []
    return [
        Request(uid, uid // num_samples, prompts[(uid - first) // num_samples], seed)
        for uid, seed in zip(uids, seeds, strict=True)
    ]
