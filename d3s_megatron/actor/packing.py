"""Kept samples -> packed micro-batches, the same number on every data-parallel rank.

Steps: 1. `distribute` gives every data-parallel rank its samples, balanced by cost; every rank computes the same
answer from lengths alone. 2. `pack` lays a rank's samples into rows of at most `max_tokens`. 3. `fill_up` adds empty
micro-batches until every rank has as many as the busiest one.

Invariants (asserted by tests/helpers.py::check_packing): every sample stands in exactly one row; no row is longer
than `max_tokens` unless it holds one sample alone; every response token is scored exactly once, from the position
before it; no scored row predicts a token of another sample; row lengths are multiples of `multiple_of`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from d3s_megatron import ops
from d3s_megatron.types import Sample, TokenBatch

# Tokens at which causal attention costs a sample as much as the matrices: a layer's parameters over heads x head size.
# 17k for Qwen2.5-0.5B, 30k for 1.5B, 65k for 7B, 104k for Llama-3.1-70B: a middle serves, as only balance hangs on it.
ATTENTION_PARITY = 32_768
PAD_SPAN = 256  # padding is cut into pieces, so that attention inside it stays cheap
PAD_ID = 0  # any valid token id: padding is a sample of its own, never attended to and never scored


def cost(length: int) -> int:
    """What a sample costs, in tokens of a short one: the matrices by its length, attention by its square."""
    return round(length * (1 + length / ATTENTION_PARITY))


def distribute(lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Sample lengths in tokens -> the sample indices of each rank, ascending, costs balanced."""
    return [sorted(part) for part in ops.balanced_partition([cost(length) for length in lengths], num_ranks)]


def pack(
    samples: Sequence[Sample],
    max_tokens: int,
    multiple_of: int = 1,
    scored: Sequence[Tensor] | None = None,
    truncate: bool = True,
) -> list[TokenBatch]:
    """Rows for one rank's samples.

    Args:
        samples: the rank's samples.
        max_tokens: most tokens in a row; a longer sample gets a row of its own.
        multiple_of: row lengths are padded to it (sequence parallelism needs the TP size).
        scored: per sample the response tokens [L] bool whose log-probs are wanted; None means all. A sample ends
            after its last scored token (nothing later can matter to it), and one without any is left out.
        truncate: False keeps samples whole and leaves none out, for comparison.
    """
    spans = []  # tokens of each sample that enter the row
    for i, sample in enumerate(samples):
        last = len(sample.response_ids)
        if scored is not None and truncate:
            picked = scored[i].nonzero().flatten()
            last = int(picked[-1]) + 1 if len(picked) else 0
        # The last scored token is a target only: no hidden state after it is ever read.
        spans.append(len(sample.prompt_ids) + last - 1 if last else 0)
    present = [i for i, span in enumerate(spans) if span]
    # A sample longer than a row fills one of its own.
    bins = ops.first_fit([min(spans[i], max_tokens) for i in present], max_tokens)
    return [_row(samples, [present[j] for j in sorted(members)], spans, multiple_of, scored) for members in bins]


def _row(samples, members, spans, multiple_of, scored) -> TokenBatch:
    tokens: list[int] = []
    positions, rows, targets, sequence, borders = [], [], [], [], [0]
    for order, i in enumerate(members):
        sample, start = samples[i], len(tokens)
        prompt_len, span = len(sample.prompt_ids), spans[i]
        tokens.extend((sample.prompt_ids + sample.response_ids)[:span])
        positions.append(torch.arange(span))
        borders.append(start + span)
        picked = torch.arange(len(sample.response_ids)) if scored is None else scored[i].nonzero().flatten()
        # Response token t is predicted from the position before it: prompt_len + t - 1.
        rows.append(start + prompt_len - 1 + picked)
        targets.append(torch.tensor(sample.response_ids, dtype=torch.int64)[picked])
        sequence.append(torch.full_like(picked, order))
    return _finish(tokens, positions, borders, rows, targets, sequence, members, multiple_of)


def _finish(tokens, positions, borders, rows, targets, sequence, members, multiple_of) -> TokenBatch:
    padding = -len(tokens) % multiple_of
    if padding:
        tokens = tokens + [PAD_ID] * padding
        positions = [*positions, torch.arange(padding)]
        borders = [*borders, len(tokens)]
    empty = torch.zeros(0, dtype=torch.int64)
    return TokenBatch(
        token_ids=torch.tensor(tokens, dtype=torch.int64),
        position_ids=torch.cat(positions),
        cu_seqlens=torch.tensor(borders, dtype=torch.int64),
        rows=torch.cat([empty, *rows]),
        targets=torch.cat([empty, *targets]),
        sequence=torch.cat([empty, *sequence]),
        samples=tuple(members),
    )


def empty_row(multiple_of: int = 1) -> TokenBatch:
    """A micro-batch that takes part in every collective and changes nothing: padding only, no scored position."""
    padding = max(1, multiple_of)
    return _finish([PAD_ID] * padding, [torch.arange(padding)], [0, padding], [], [], [], [], 1)


def fill_up(rows: list[TokenBatch], num_microbatches: int, multiple_of: int = 1) -> list[TokenBatch]:
    """Adds empty micro-batches up to the number that the busiest rank has."""
    return rows + [empty_row(multiple_of) for _ in range(num_microbatches - len(rows))]


def same_length(rows: list[TokenBatch]) -> list[TokenBatch]:
    """Pads every row to the longest one: pipeline stages exchange activations of one shape."""
    longest = max(len(row.token_ids) for row in rows)
    return [_pad_to(row, longest) for row in rows]


def _pad_to(row: TokenBatch, length: int) -> TokenBatch:
    padding = length - len(row.token_ids)
    if not padding:
        return row
    start = len(row.token_ids)
    borders = [*range(start + PAD_SPAN, length, PAD_SPAN), length]
    return TokenBatch(
        token_ids=torch.cat([row.token_ids, torch.full((padding,), PAD_ID)]),
        position_ids=torch.cat([row.position_ids, torch.arange(padding) % PAD_SPAN]),
        cu_seqlens=torch.cat([row.cu_seqlens, torch.tensor(borders)]),
        rows=row.rows,
        targets=row.targets,
        sequence=row.sequence,
        samples=row.samples,
    )


def split_rows(values: Tensor, rows: Sequence[TokenBatch], num_samples: int) -> list[Tensor]:
    """Values of all scored positions, row after row [sum S], to one tensor [L] per sample."""
    out: list[Tensor] = [values[:0]] * num_samples
    start = 0
    for row in rows:
        counts = torch.bincount(row.sequence, minlength=len(row.samples)).tolist()
        for sample, count in zip(row.samples, counts, strict=True):
            out[sample] = values[start : start + count]
            start += count
    assert start == len(values), (start, len(values))
    return out
