"""Kept samples -> packed micro-batches, the same number on every data-parallel rank.

Steps: 1. `distribute` gives every data-parallel rank its samples, balanced by cost; every rank computes the same
answer from lengths alone. 2. `pack` lays a rank's samples into rows of at most `max_tokens`. 3. `fill_up` adds empty
micro-batches until every rank has as many as the busiest one.

Invariants (asserted by tests/helpers.py::check_packing): every sample stands in exactly one row; no row is longer
than `max_tokens` unless it holds one sample alone; every response token is scored exactly once, from the position
before it, behind its own prompt; row lengths are multiples of `multiple_of`. Samples of one prompt that meet in a row
share the prompt's tokens: the layers run on them once, and attention reads them with each sample (Prefix Grouper,
arXiv 2506.05433).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from d3s_megatron import ops
from d3s_megatron.ragged import Ragged
from d3s_megatron.types import Sample, TokenBatch

# Tokens at which causal attention costs a sample as much as the matrices: a layer's parameters over heads x head size.
# 17k for Qwen2.5-0.5B, 30k for 1.5B, 65k for 7B, 104k for Llama-3.1-70B: a middle serves, as only balance hangs on it.
ATTENTION_PARITY = 32_768
# Samples of a prompt are kept together in pieces of at most a quarter of a rank's share, so that shares stay even, and
# only where prompts are a tenth of the tokens or more.
UNITS_PER_RANK, WORTH_SHARING = 4, 0.1
PAD_SPAN = 256  # padding is cut into pieces, so that attention inside it stays cheap
PAD_ID = 0  # any valid token id: padding is a sample of its own, never attended to and never scored


def cost(lengths: Tensor) -> Tensor:
    """What samples of these lengths cost, in tokens of a short one: matrices by the length, attention by its square."""
    return (lengths * (1 + lengths.double() / ATTENTION_PARITY)).round().long()


def distribute(lengths: Tensor, num_ranks: int, prompts: Tensor | None = None, groups: Tensor | None = None) -> Tensor:
    """The rank [K] that gets each sample, costs balanced.

    Args:
        lengths: [K] tokens of prompt and response.
        prompts: [K] those of the prompt; where they are much of the whole, samples of a group stay together.
        groups: [K] which prompt a sample has; samples of one stand side by side.
    """
    costs = cost(lengths)
    units = torch.arange(len(costs))  # what goes to a rank as a whole: ascending numbers
    if prompts is not None and groups is not None and int(prompts.sum()) >= WORTH_SHARING * int(lengths.sum()):
        most = int(costs.sum()) / (UNITS_PER_RANK * num_ranks)
        _, group, sizes = torch.unique_consecutive(groups, return_inverse=True, return_counts=True)
        before = costs.cumsum(0) - costs
        before -= before[(sizes.cumsum(0) - sizes)[group]]  # of the same group
        _, units, sizes = torch.unique_consecutive(
            torch.stack([group, (before / most).long()], 1), dim=0, return_inverse=True, return_counts=True
        )
        costs = torch.zeros(len(sizes), dtype=torch.int64).index_add_(0, units, costs)
        costs -= prompts[sizes.cumsum(0) - sizes] * (sizes - 1)  # the layers run on a shared prompt once
    rank_of = torch.empty(len(costs), dtype=torch.int64)
    for rank, members in enumerate(ops.balanced_partition(costs.tolist(), num_ranks)):
        rank_of[members] = rank
    return rank_of[units]


def pack(
    samples: Sequence[Sample],
    max_tokens: int,
    multiple_of: int = 1,
    scored: Sequence[Tensor] | None = None,
    truncate: bool = True,
    share_prompts: bool = True,
    sample_multiple: int = 1,
) -> list[TokenBatch]:
    """Rows for one rank's samples.

    Args:
        samples: the rank's samples.
        max_tokens: most tokens in a row, a shared prompt counted with each of its samples, as attention reads it with
            each; a longer sample gets a row of its own.
        multiple_of: row lengths are padded to it (sequence parallelism needs the TP size).
        scored: per sample the response tokens [L] bool whose log-probs are wanted; None means all. A sample ends
            after its last scored token (nothing later can matter to it), and one without any is left out.
        truncate: False keeps samples whole and leaves out empty responses only, for comparison.
        share_prompts: False lays a prompt's tokens out with each of its samples, for comparison.
        sample_multiple: samples are padded to it at their ends (context parallelism); it divides `multiple_of`, and
            such samples share no prompt.
    """
    assert sample_multiple == 1 or not share_prompts, "a padded prompt has no place for what continues it"
    if not samples:
        return []
    source = _Source.of(samples, scored)
    last = source.last if truncate else source.lengths
    # The last scored token is a target only: no hidden state after it is ever read.
    spans = [len(s.prompt_ids) + end - 1 if end else 0 for s, end in zip(samples, last, strict=True)]
    present = [i for i, span in enumerate(spans) if span]
    # A sample longer than a row fills one of its own.
    bins = ops.first_fit([min(spans[i] + -spans[i] % sample_multiple, max_tokens) for i in present], max_tokens)
    return [
        _row(source, [present[j] for j in members], spans, multiple_of, share_prompts, sample_multiple)
        for members in bins
    ]


@dataclass(frozen=True)
class _Source:
    """A rank's samples as flat arrays: R response tokens laid end to end, P of them scored."""

    samples: Sequence[Sample]
    lengths: list[int]  # response tokens of each sample
    last: list[int]  # the same up to its last scored token
    response_ids: Tensor  # [R]
    offset: Tensor  # [R] place in the response of its own sample
    picked: Tensor  # [P] indices of scored tokens, ascending
    first: Tensor  # [n] where each sample's begin in `picked`
    counts: Tensor  # [n] how many each has

    @staticmethod
    def of(samples: Sequence[Sample], scored: Sequence[Tensor] | None) -> _Source:
        lengths = torch.tensor([len(s.response_ids) for s in samples])
        ends = lengths.cumsum(0)
        num = int(ends[-1])
        owner = torch.arange(len(samples)).repeat_interleave(lengths)
        offset = torch.arange(num) - (ends - lengths)[owner]
        picked = torch.arange(num) if scored is None else Ragged.of(scored).flat.nonzero().flatten()
        counts = torch.bincount(owner[picked], minlength=len(samples))
        after = counts.cumsum(0)
        last = torch.zeros_like(lengths)
        last[counts > 0] = offset[picked[after[counts > 0] - 1]] + 1
        ids = torch.tensor([token for s in samples for token in s.response_ids], dtype=torch.int64)
        return _Source(samples, lengths.tolist(), last.tolist(), ids, offset, picked, after - counts, counts)


def _row(
    source: _Source,
    members: Sequence[int],
    spans: Sequence[int],
    multiple_of: int,
    share_prompts: bool,
    sample_multiple: int,
) -> TokenBatch:
    """One row: the prompts of the members where they are shared, each followed by its responses."""
    by_prompt: dict[object, list[int]] = {}
    for i in members:
        by_prompt.setdefault(source.samples[i].prompt_ids if share_prompts else i, []).append(i)
    tokens: list[int] = []
    borders, begins, prefix = [0], [], []  # `begins`: the position of each segment's first token

    def add(ids: tuple[int, ...], begin: int, continues: int) -> None:
        tokens.extend(ids)
        borders.append(len(tokens))
        begins.append(begin)
        prefix.append(continues)

    order, before, base = [], [], []  # samples; the rows of their prompt's last and their response's first token
    for group in by_prompt.values():
        prompt_ids = source.samples[group[0]].prompt_ids
        num, root = len(prompt_ids), len(prefix)
        if len(group) > 1:
            add(prompt_ids, 0, -1)
            end_of_prompt = len(tokens) - 1
        for i in group:
            response_ids = source.samples[i].response_ids[: spans[i] - num]
            if len(group) == 1:
                end_of_prompt = len(tokens) + num - 1
                filling = (PAD_ID,) * (-spans[i] % sample_multiple)  # behind the last token: nothing attends to it
                add(prompt_ids + response_ids + filling, 0, -1)
                base.append(end_of_prompt + 1)
            else:
                base.append(len(tokens))
                if response_ids:
                    add(response_ids, num, root)
            order.append(i)
            before.append(end_of_prompt)

    chosen = torch.tensor(order)
    counts = source.counts[chosen]  # [m]
    sequence = torch.arange(len(order)).repeat_interleave(counts)  # [S]
    ramp = torch.arange(len(sequence)) - (counts.cumsum(0) - counts - source.first[chosen])[sequence]
    token_index = source.picked[ramp]
    offset = source.offset[token_index]
    # A response's first token is predicted from its prompt's last, the others from the one before.
    rows = torch.where(offset == 0, torch.tensor(before)[sequence], torch.tensor(base)[sequence] + offset - 1)
    batch = TokenBatch(
        token_ids=torch.tensor(tokens),
        position_ids=_positions(borders, begins),
        cu_seqlens=torch.tensor(borders),
        prefix=torch.tensor(prefix),
        rows=rows,
        targets=source.response_ids[token_index],
        token_index=token_index,
        sequence=sequence,
        samples=tuple(order),
    )
    return _pad_to(batch, len(tokens) + -len(tokens) % multiple_of)


def _positions(borders: list[int], begins: list[int]) -> Tensor:
    lengths = torch.tensor(borders).diff()
    return torch.arange(borders[-1]) - (torch.tensor(borders[:-1]) - torch.tensor(begins)).repeat_interleave(lengths)


def empty_row(multiple_of: int = 1) -> TokenBatch:
    """A micro-batch that takes part in every collective and changes nothing: padding only, no scored position."""
    none = torch.zeros(0, dtype=torch.int64)
    nothing = TokenBatch(none, none, torch.zeros(1, dtype=torch.int64), none, none, none, none, none, ())
    return _pad_to(nothing, max(1, multiple_of))


def fill_up(rows: list[TokenBatch], num_microbatches: int, multiple_of: int = 1) -> list[TokenBatch]:
    """Adds empty micro-batches up to the number that the busiest rank has."""
    return rows + [empty_row(multiple_of) for _ in range(num_microbatches - len(rows))]


def same_length(rows: list[TokenBatch], sample_multiple: int = 1) -> list[TokenBatch]:
    """Pads every row to the longest one: pipeline stages exchange activations of one shape."""
    longest = max(len(row.token_ids) for row in rows)
    return [_pad_to(row, longest, PAD_SPAN + -PAD_SPAN % sample_multiple) for row in rows]


def _pad_to(row: TokenBatch, length: int, piece: int = PAD_SPAN) -> TokenBatch:
    """With segments of padding at its end, which attend to nothing but themselves."""
    start = len(row.token_ids)
    padding = length - start
    if not padding:
        return row
    borders = [*range(start + piece, length, piece), length]
    return replace(
        row,
        token_ids=torch.cat([row.token_ids, torch.full((padding,), PAD_ID)]),
        position_ids=torch.cat([row.position_ids, torch.arange(padding) % piece]),
        cu_seqlens=torch.cat([row.cu_seqlens, torch.tensor(borders)]),
        prefix=torch.cat([row.prefix, torch.full((len(borders),), -1)]),
    )


def split_rows(values: Tensor, rows: Sequence[TokenBatch], lengths: Sequence[int]) -> list[Tensor]:
    """Values of all response tokens, row after row [sum L], to one tensor [L] per sample of these lengths."""
    out = torch.empty_like(values)
    assert len(values) == sum(lengths), (len(values), sum(lengths))
    if rows:
        out[torch.cat([row.token_index for row in rows])] = values
    return list(out.split(list(lengths)))
