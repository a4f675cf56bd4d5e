"""From the prompts of a batch to the requests of a step."""

from __future__ import annotations

from collections.abc import Sequence

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
    requests = []
    for group_id, prompt in enumerate(prompts, start=first_group):
        for uid in range(group_id * num_samples, (group_id + 1) * num_samples):
            requests.append(Request(uid, group_id, prompt, seed=mix64(seed, step, uid, _SALT)))
    return requests
