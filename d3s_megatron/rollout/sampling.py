"""Drawing tokens without a random state: the uniform of a token is a hash of (request seed, position).

A stateful generator would make an answer depend on its neighbours in the batch, on the batch size and on the rank
that computed it. A counter-based one makes each answer a function of its own seed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from d3s_megatron.ops import mix64
from d3s_megatron.rollout.engine import Sampling

_UNIFORM_BITS = 52  # not 53: total * (1 - 2**-52) is below total in float64, so the search below always hits

# Rows whose float64 copy of the logits is held at once: bounds the extra memory at large vocabularies.
_ELEMENTS_AT_ONCE = 1 << 26


def sample_tokens(logits: Tensor, seeds: Tensor, position: int, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Token ids [B] int64 and their log-probs [B] float32 for logits [B, V] and request seeds [B] int64.

    `position` counts the response tokens from 0. Inverse CDF in float64 over the vocabulary in id order.
    """
    rows = max(1, _ELEMENTS_AT_ONCE // logits.shape[1])
    parts = [
        _sample(part, part_seeds, position, sampling)
        for part, part_seeds in zip(logits.split(rows), seeds.split(rows), strict=True)
    ]
    if len(parts) == 1:
        return parts[0]
    return torch.cat([ids for ids, _ in parts]), torch.cat([log_probs for _, log_probs in parts])


def _sample(logits: Tensor, seeds: Tensor, position: int, sampling: Sampling) -> tuple[Tensor, Tensor]:
    if sampling.temperature == 0:
        log_probs = logits.float().log_softmax(-1)
        ids = log_probs.argmax(-1)
    else:
        log_probs = (logits.float() / sampling.temperature).log_softmax(-1)
        if sampling.top_k or sampling.top_p < 1:
            log_probs = log_probs.masked_fill(~_allowed(log_probs, sampling), -torch.inf).log_softmax(-1)
        cumulative = log_probs.double().exp().cumsum(-1)
        threshold = uniforms(seeds, position)[:, None] * cumulative[:, -1:]
        # The first id whose cumulative probability exceeds the threshold: its own probability is above 0.
        ids = torch.searchsorted(cumulative, threshold, right=True)[:, 0]
    return ids, log_probs.gather(1, ids[:, None])[:, 0]


def _allowed(log_probs: Tensor, sampling: Sampling) -> Tensor:
    """Tokens [B, V] within the k most likely and within top_p mass, at least one; ties go to the lower id."""
    values, order = log_probs.sort(dim=-1, descending=True, stable=True)
    keep = torch.ones_like(values, dtype=torch.bool)
    if sampling.top_k:
        keep[:, sampling.top_k :] = False
    if sampling.top_p < 1:
        before = values.double().exp().cumsum(-1) - values.double().exp()
        keep &= before < sampling.top_p
    return torch.zeros_like(keep).scatter(1, order, keep)


def uniforms(seeds: Tensor, position: int) -> Tensor:
    """Uniform numbers [B] float64 in [0, 1) for request seeds [B] int64 at one position."""
    bits = mix64(seeds, position) >> (64 - _UNIFORM_BITS)
    return (bits & ((1 << _UNIFORM_BITS) - 1)).double() * 2.0**-_UNIFORM_BITS  # the mask removes the copied sign
