"""Brings what an audit needs from all ranks together: small arrays, in one collective a step, and tokens to show.

Floats travel as their bits in an int64, so ids and scores share one message and nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from d3s_megatron import ops
from d3s_megatron.actor.megatron_actor import MegatronActor
from d3s_megatron.actor.parallel import Layout, gather_rows
from d3s_megatron.algorithms.token_selection import settle_ties
from d3s_megatron.audit.files import HISTOGRAM_EDGES
from d3s_megatron.rewards.reward import STATUSES
from d3s_megatron.stages import Batch
from d3s_megatron.types import Experience, Prompt, Rollout, Verdict

EDGES = torch.tensor(HISTOGRAM_EDGES)
STATUS_NAMES = (*STATUSES, "other")  # the last for what rewards/ does not list


@dataclass(frozen=True)
class StepRecord:
    """What one rank knows of a training step once it is selected."""

    prompts: Sequence[Prompt]  # of the whole batch, by group id
    rollouts: Sequence[Rollout]  # made by this rank
    verdicts: Sequence[Verdict]  # theirs
    judged: Experience
    selected: Experience
    batch: Batch  # what this rank trains on


@dataclass(frozen=True)
class TokenRow:
    """The tokens of one rollout; scores only where it was kept, and so scored."""

    token_ids: list[int]
    entropy: list[float] | None = None
    score: list[float] | None = None  # abs(A) x H as it was ranked
    kept: list[bool] | None = None


@dataclass(frozen=True)
class Gathered:
    """The same on every rank, but for `tokens`."""

    status: Tensor  # [N] int64 by uid, an index into STATUS_NAMES
    num_kept_tokens: Tensor  # [N] int64 by uid
    mean_entropy: Tensor  # [N] float64 by uid, nats; NaN where a rollout was dropped, and so not scored
    histogram: Tensor  # [2, 66] int64: all scored tokens, and the kept ones
    threshold: float | None  # lowest score that was kept
    kept_checksum: int  # of (uid, position) of the kept tokens
    weights_checksum: int
    gradients_checksum: int | None
    tokens: dict[int, TokenRow]  # of the rollouts that were asked for; on the first rank alone


def bits_of(values: Tensor) -> Tensor:
    """[n] floats as int64, exactly."""
    return values.double().view(torch.int64)


def floats_of(bits: Tensor) -> Tensor:
    """The inverse of `bits_of`: [n] float64."""
    return bits.contiguous().view(torch.float64)


def checksums(actor: MegatronActor, updated: bool) -> tuple[int, int | None]:
    """Sums of this rank's weights and of its gradients as whole numbers: equal bits give equal sums.

    Gradients are those that the last update left behind; None where there was none or they were moved away since.
    """

    def total(tensors) -> int:
        sums = [_as_integers(t.detach().flatten()).sum(dtype=torch.int64) for t in tensors if t.numel()]
        return int(torch.stack(sums).sum()) if sums else 0

    weights = total(p.data for chunk in actor.chunks for p in chunk.parameters())
    if not updated or actor.host.is_offloaded:
        return weights, None
    buffers = [b for chunk in actor.ddp for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    return weights, total(buffer.grad_data for buffer in buffers)


def _as_integers(values: Tensor) -> Tensor:
    """A flat tensor's bits as whole numbers, as few as there can be: the fewer, the sooner summed."""
    size = values.element_size()
    if values.numel() * size % 8 == 0 and values.data_ptr() % 8 == 0:
        return values.view(torch.int64)
    return values.view({2: torch.int16, 4: torch.int32}[size])


def gather(record: StepRecord, actor: MegatronActor, layout: Layout, shown: Sequence[int], updated: bool) -> Gathered:
    """A collective over all ranks.

    Args:
        updated: the step has updated the weights.
        shown: group ids whose rollouts' tokens are wanted.
    """
    wanted = set(shown)
    made = [
        (r.request.uid, STATUSES.index(v.status) if v.status in STATUSES else len(STATUSES))
        for r, v in zip(record.rollouts, record.verdicts, strict=True)
    ]
    ids = [
        number
        for r in record.rollouts
        if r.request.group_id in wanted
        for number in (r.request.uid, len(r.token_ids), *r.token_ids)
    ]
    weights, gradients = checksums(actor, updated)
    state = torch.tensor([weights, gradients or 0, gradients is None], dtype=torch.int64)
    empty = torch.zeros(0, dtype=torch.int64)
    # One rank of each model replica speaks for it.
    samples, numbers, scores = _of_trained(record, wanted) if layout.speaks else (empty, empty, empty)
    tokens = [torch.tensor(ids, dtype=torch.int64), scores]
    sizes = torch.tensor([len(part) for part in tokens])
    parts = [torch.tensor(made, dtype=torch.int64).flatten(), state, samples, numbers, sizes]
    borders = torch.tensor([len(part) for part in parts])
    by_rank = [_split(vector, len(parts)) for vector in gather_rows(torch.cat([borders, *parts]), layout)]
    made_all, states, samples, numbers, all_sizes = (torch.cat(column) for column in zip(*by_rank, strict=True))
    states, samples = states.view(-1, 3).sum(0), samples.view(-1, 3)
    numbers = numbers.view(-1, 4 + 2 * (len(EDGES) + 1))
    ids_all, scores_all = (
        _to_first(part, column.tolist(), layout) for part, column in zip(tokens, all_sizes.view(-1, 2).T, strict=True)
    )
    lowest = float(floats_of(numbers[:, 0]).min())
    num = len(record.judged.uids)

    def by_uid(uids: Tensor, values: Tensor, otherwise: float = 0) -> Tensor:
        return torch.full((num,), otherwise, dtype=values.dtype).index_copy(0, uids, values)

    made_uids, statuses = made_all.view(-1, 2).unbind(1)
    return Gathered(
        status=by_uid(made_uids, statuses),
        num_kept_tokens=by_uid(samples[:, 0], samples[:, 1]),
        mean_entropy=by_uid(samples[:, 0], floats_of(samples[:, 2]), float("nan")),
        histogram=numbers[:, 4:].sum(0).view(2, -1),
        threshold=lowest if lowest < float("inf") else None,
        kept_checksum=int(numbers[:, 1].sum()),
        weights_checksum=int(states[0]),
        gradients_checksum=None if states[2] else int(states[1]),
        tokens=_tokens(ids_all.tolist(), scores_all),
    )


def _to_first(local: Tensor, sizes: list[int], layout: Layout) -> Tensor:
    """All ranks' vectors, one after the other, on the first rank; nothing on the others.

    Not gathered as the rest is: few ranks hold tokens that are shown, and padding would give every rank as many.
    """
    if layout.rank:
        if len(local):
            dist.send(local.to(layout.device), 0)
        return local[:0]
    found = [local]
    for rank, size in enumerate(sizes):
        if rank and size:
            part = torch.empty(size, dtype=torch.int64, device=layout.device)
            dist.recv(part, rank)
            found.append(part.cpu())
    return torch.cat(found)


def _split(vector: Tensor, num: int) -> tuple[Tensor, ...]:
    return vector[num:].split(vector[:num].tolist())


def _of_trained(record: StepRecord, wanted: set[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Of this replica's samples: a row each; sums over all; and each token's numbers where they are wanted."""
    batch, experience = record.batch, record.selected
    lengths = torch.tensor([len(sample.response_ids) for sample in batch.samples], dtype=torch.int64)
    uids = torch.tensor([sample.uid for sample in batch.samples], dtype=torch.int64)
    zero = torch.zeros(0)
    keep = batch.keep.flat
    entropy = torch.cat([zero, *(score.entropy for score in batch.scored())])
    advantages = torch.tensor([sample.advantage for sample in batch.samples], dtype=torch.float64)
    # As the selection computes it, to the last bit: a float32 product of the rounded advantage.
    score = settle_ties(advantages.abs().float().repeat_interleave(lengths) * entropy)
    ends = lengths.cumsum(0)

    def per_sample(values: Tensor) -> Tensor:
        sums = torch.cat([values.new_zeros(1), values.cumsum(0)])
        return sums[ends] - sums[ends - lengths]

    means = per_sample(entropy.double()) / lengths
    rows = torch.stack([uids, per_sample(keep.long()), bits_of(means)], 1).flatten()
    position = torch.arange(len(keep)) - (ends - lengths).repeat_interleave(lengths)
    keys = ops.mix64((uids << 32).repeat_interleave(lengths) + position)[keep].sum() if len(keep) else 0
    lowest = score[keep].min() if keep.any() else torch.tensor(float("inf"))
    bins = torch.bucketize(score, EDGES, right=True)
    counts = [torch.bincount(chosen, minlength=len(EDGES) + 1) for chosen in (bins, bins[keep])]
    sums = torch.cat([bits_of(lowest[None]), torch.tensor([int(keys), 0, 0]), *counts])
    details = []
    for i, sample in enumerate(batch.samples):
        if int(experience.group_ids[sample.uid]) in wanted:
            mine = slice(int(ends[i] - lengths[i]), int(ends[i]))
            head = torch.tensor([sample.uid, int(lengths[i])])
            details += [head, bits_of(entropy[mine]), bits_of(score[mine]), keep[mine].long()]
    return rows, sums, torch.cat([torch.zeros(0, dtype=torch.int64), *details])


def _tokens(ids: list[int], scores: Tensor) -> dict[int, TokenRow]:
    rows: dict[int, TokenRow] = {}
    at = 0
    while at < len(ids):
        uid, num = ids[at : at + 2]
        rows[uid] = TokenRow(ids[at + 2 : at + 2 + num])
        at += 2 + num
    at = 0
    while at < len(scores):
        uid, num = scores[at : at + 2].tolist()
        entropy, score, kept = scores[at + 2 : at + 2 + 3 * num].split(num)
        rows[uid] = TokenRow(
            rows[uid].token_ids, floats_of(entropy).tolist(), floats_of(score).tolist(), kept.bool().tolist()
        )
        at += 2 + 3 * num
    return rows
