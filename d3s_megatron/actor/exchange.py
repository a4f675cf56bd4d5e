"""Moves the kept rollouts' token ids between ranks, once a step, and shares them out.

Rollouts are made wherever there is a rank; a kept one is trained by one data-parallel replica, of which every rank
needs its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from d3s_megatron import ops
from d3s_megatron.actor.packing import distribute
from d3s_megatron.actor.parallel import Layout, gather_rows
from d3s_megatron.types import Rollout, Sample


def gather_samples(local: Sequence[Rollout], advantages: Tensor, layout: Layout) -> list[Sample]:
    """This rank's kept rollouts -> those of all ranks, in uid order, the same on every rank.

    Args:
        local: kept rollouts that this rank made.
        advantages: [N] float64, by uid.
    """
    numbers: list[int] = []
    log_probs: list[float] = []
    for rollout in local:
        prompt = rollout.request.prompt.token_ids
        numbers += [rollout.request.uid, len(prompt), len(rollout.token_ids), *prompt, *rollout.token_ids]
        log_probs += rollout.log_probs
    all_numbers = gather_rows(torch.tensor(numbers, dtype=torch.int64), layout)
    all_log_probs = gather_rows(torch.tensor(log_probs, dtype=torch.float32), layout)
    samples = []
    for ids, probs in zip(all_numbers, all_log_probs, strict=True):
        samples += _decode(ids.tolist(), probs.tolist(), advantages)
    return sorted(samples, key=lambda sample: sample.uid)


def _decode(ids: list[int], log_probs: list[float], advantages: Tensor) -> list[Sample]:
    samples, at, done = [], 0, 0
    while at < len(ids):
        uid, num_prompt, num_response = ids[at : at + 3]
        at += 3
        samples.append(
            Sample(
                uid=uid,
                prompt_ids=tuple(ids[at : at + num_prompt]),
                response_ids=tuple(ids[at + num_prompt : at + num_prompt + num_response]),
                rollout_log_probs=tuple(log_probs[done : done + num_response]),
                advantage=float(advantages[uid]),
            )
        )
        at += num_prompt + num_response
        done += num_response
    return samples


def share_out(
    samples: Sequence[Sample], num_minibatches: int, layout: Layout, seed: int, step: int
) -> list[list[Sample]]:
    """This data-parallel rank's samples of each mini-batch.

    Mini-batches are drawn by the hash of (seed, step, uid) and differ in size by at most one; each is balanced by
    tokens over the data-parallel ranks. There are never more mini-batches than samples.
    """
    order = sorted(samples, key=lambda sample: ops.mix64(seed, step, sample.uid))
    num = max(1, min(num_minibatches, len(order)))
    out = []
    for m in range(num):
        part = sorted(order[m::num], key=lambda sample: sample.uid)
        lengths = [len(sample.prompt_ids) + len(sample.response_ids) for sample in part]
        shares = distribute(lengths, layout.dp_size)
        out.append([part[i] for i in shares[layout.dp_rank]])
    return out
