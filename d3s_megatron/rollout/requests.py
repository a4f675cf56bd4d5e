"""From the prompts of a batch to the requests of a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from d3s_megatron.ops import mix64
from d3s_megatron.types import Prompt, Request

_SALT = 0x524F4C4C  # keeps these hashes apart from the tie keys, which come from the same (seed, step, uid)


def make_requests(
    prompts: Sequence[Prompt], num_samples: int, seed: int, step: int, slots: Sequence[int] | None = None
) -> list[Request]:
    """`num_samples` requests for each prompt, prompt by prompt; uid is group_id * num_samples + sample.

    A rank that holds a share of the batch passes the place in the batch of each of its prompts as `slots`, which are
    the group ids; uids and seeds are then those that one rank alone would have given.
    """
    groups = range(len(prompts)) if slots is None else slots
    uids = [group * num_samples + sample for group in groups for sample in range(num_samples)]
    seeds = mix64(seed, step, torch.tensor(uids, dtype=torch.int64), _SALT).tolist() if uids else []
    asked = [(group, prompt) for group, prompt in zip(groups, prompts, strict=True) for _ in range(num_samples)]
    return [Request(uid, group, prompt, one) for uid, one, (group, prompt) in zip(uids, seeds, asked, strict=True)]
