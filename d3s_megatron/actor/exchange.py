"""Moves the kept rollouts' token ids between ranks, once a step, to where they are trained.

Rollouts are made wherever there is a rank; a kept one is trained by one data-parallel replica, of which every rank
needs its tokens, and no other. Steps: 1. the batch's Experience says who holds which rollout and how long it is.
2. `plan_shares` draws the mini-batches and balances each over the replicas; every rank computes the same. 3. Each rank
sends each of its rollouts to the ranks of one replica. So what a rank receives, and the memory and time it takes, is
its own share of the batch, however many ranks there are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from d3s_megatron import ops
from d3s_megatron.actor.packing import distribute
from d3s_megatron.actor.parallel import Layout
from d3s_megatron.types import Experience, Rollout, Sample


def share_out(
    local: Sequence[Rollout],
    experience: Experience,
    which: Tensor,
    num_minibatches: int,
    layout: Layout,
    share_prompts: bool = True,
) -> list[list[Sample]]:
    """This data-parallel rank's samples of each mini-batch, in uid order; a collective over all ranks.

    Args:
        local: the rollouts that this rank made.
        which: [N] bool, those of the batch to share out.
        share_prompts: keep rollouts of a prompt together, as far as shares stay even.
    """
    uids = experience.uids[which]  # [K]
    uids = uids[experience.makers[uids].argsort(stable=True)]  # as they arrive: rank by rank, by uid within a rank
    prompts, source = experience.prompt_lengths[uids], experience.makers[uids]
    whole = prompts + experience.lengths[uids]
    minibatch, replica = plan_shares(
        uids,
        whole,
        num_minibatches,
        layout.dp_size,
        experience.seed,
        experience.step,
        *((prompts, experience.group_ids[uids]) if share_prompts else ()),
    )
    target = dict(zip(uids.tolist(), replica.tolist(), strict=True))
    outgoing: list[list[Rollout]] = [[] for _ in range(layout.dp_size)]
    for rollout in sorted(local, key=lambda one: one.request.uid):
        if rollout.request.uid in target:
            outgoing[target[rollout.request.uid]].append(rollout)
    incoming = replica == layout.dp_rank
    num_ids, num_log_probs = (
        torch.bincount(source[incoming], lengths[incoming].double(), layout.world_size).long().tolist()
        for lengths in (whole, experience.lengths[uids])
    )
    ids, log_probs = _exchange(outgoing, num_ids, num_log_probs, layout)
    samples: list[list[Sample]] = [[] for _ in range(int(minibatch.max()) + 1 if len(uids) else 1)]
    token_ids, floats, advantages = ids.tolist(), log_probs.tolist(), experience.advantages.tolist()
    at, done = 0, 0
    for uid, prompt, total, part in zip(
        *(column[incoming].tolist() for column in (uids, prompts, whole, minibatch)), strict=True
    ):
        tokens = tuple(token_ids[at : at + total])
        sample = Sample(
            uid=uid,
            prompt_ids=tokens[:prompt],
            response_ids=tokens[prompt:],
            rollout_log_probs=tuple(floats[done : done + total - prompt]),
            advantage=advantages[uid],
        )
        samples[part].append(sample)
        at, done = at + total, done + total - prompt
    return [sorted(part, key=lambda sample: sample.uid) for part in samples]


def plan_shares(
    uids: Tensor,
    lengths: Tensor,
    num_minibatches: int,
    num_replicas: int,
    seed: int,
    step: int,
    prompts: Tensor | None = None,
    groups: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The mini-batch and the replica of each rollout, [K] int64 both; the same in any order of the rollouts.

    Mini-batches are drawn by the hash of (seed, step, uid) and differ in size by at most one; each is balanced by
    cost over the replicas. There are never more mini-batches than rollouts.

    Args:
        uids: [K] int64.
        lengths: [K] int64, prompt and response tokens.
        prompts, groups: [K] int64, prompt tokens and which prompt it is; see `distribute`.
    """
    minibatch, replica = torch.zeros_like(uids), torch.zeros_like(uids)
    if not len(uids):
        return minibatch, replica
    keys = ops.mix64(seed, step, uids)
    assert isinstance(keys, Tensor)
    order = keys.argsort()
    num = max(1, min(num_minibatches, len(uids)))
    for m in range(num):
        part = order[m::num]
        part = part[uids[part].argsort()]
        minibatch[part] = m
        of_part = [None if column is None else column[part] for column in (prompts, groups)]
        replica[part] = distribute(lengths[part], num_replicas, *of_part)
    return minibatch, replica


def _exchange(
    outgoing: Sequence[Sequence[Rollout]], num_ids: Sequence[int], num_log_probs: Sequence[int], layout: Layout
) -> tuple[Tensor, Tensor]:
    """Sends the rollouts of `outgoing[replica]` to every rank of it; token ids and log-probs that arrive, by source.

    Args:
        num_ids, num_log_probs: how many come from each rank.
    """
    pieces = [torch.cat([_ids(rollouts), _log_probs(rollouts).view(torch.int32)]) for rollouts in outgoing]
    sent = [pieces[layout.replica_of(rank)] for rank in range(layout.world_size)]
    sizes = [ids + log_probs for ids, log_probs in zip(num_ids, num_log_probs, strict=True)]
    received = torch.empty(sum(sizes), dtype=torch.int32, device=layout.device)
    dist.all_to_all_single(received, torch.cat(sent).to(layout.device), sizes, [len(piece) for piece in sent])
    both = received.cpu().split([num for pair in zip(num_ids, num_log_probs, strict=True) for num in pair])
    return torch.cat(both[0::2]), torch.cat(both[1::2]).view(torch.float32)


def _ids(rollouts: Sequence[Rollout]) -> Tensor:
    ids = [token for r in rollouts for part in (r.request.prompt.token_ids, r.token_ids) for token in part]
    return torch.tensor(ids, dtype=torch.int32)


def _log_probs(rollouts: Sequence[Rollout]) -> Tensor:
    return torch.tensor([p for r in rollouts for p in r.log_probs], dtype=torch.float32)
