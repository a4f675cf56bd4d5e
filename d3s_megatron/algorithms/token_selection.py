"""Token selection (method 1.8): the top share of all response tokens of the kept rollouts by abs(A) x entropy.

One ranking over the whole batch and all data-parallel ranks; the scores themselves never leave their rank. Its
controls rank by entropy alone, or by chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from d3s_megatron import ops
from d3s_megatron.algorithms.sample_selection import CHANCE
from d3s_megatron.ragged import Ragged
from d3s_megatron.types import Reduce, Sample, Scores

SCORE_BITS = 12  # of a float32's 23: steps of about 0.02%, far above float32 noise and far below what ranks tokens


def settle_ties(scores: Tensor) -> Tensor:
    """[n] float32 scores rounded to SCORE_BITS of mantissa, so that equal scores are equal after rounding noise too.

    Rollouts of one prompt share their first tokens as often as not, and so exactly the same score there. Their
    computed scores differ in the last bits by how the batch was packed; without this, packing would pick among them.
    """
    dropped = 23 - SCORE_BITS
    bits = scores.contiguous().view(torch.int32) + (1 << (dropped - 1))
    return bits.bitwise_and_(-(1 << dropped)).view(torch.float32)


def _per_token(values: Sequence[Tensor]) -> Tensor:
    """[n] of the samples' values [L], one after the other; float32 also where there are none."""
    return torch.cat([torch.zeros(0), *values])


@dataclass(frozen=True)
class AllTokens:
    """Every response token of the kept rollouts is trained on."""

    fixed_share: ClassVar[float | None] = 1.0

    def __call__(
        self,
        samples: Sequence[Sample],
        scores: Sequence[Scores] | None,
        share: float,
        seed: int,
        step: int,
        reduce: Reduce,
    ) -> Ragged:
        """Per sample a mask [L] bool; the only selection that scores may come after."""
        return Ragged.full([len(sample.response_ids) for sample in samples], True)


@dataclass(frozen=True)
class TopShare:
    """The `share` of tokens with the highest score, exactly k of them over all ranks.

    by: abs(advantage) x entropy, which is the method's; entropy alone (the 80/20 paper's, arXiv 2506.01939); or chance.
    fixed_share: the share whatever the configuration says; unset takes it from there, by the schedule.
    """

    by: Literal["signal", "entropy", "chance"] = "signal"
    fixed_share: float | None = None

    def __call__(
        self,
        samples: Sequence[Sample],
        scores: Sequence[Scores] | None,
        share: float,
        seed: int,
        step: int,
        reduce: Reduce,
    ) -> Ragged:
        """Per sample a mask [L] bool; ties (see `settle_ties`) fall by (hash of seed, step and uid; position).

        Args:
            samples, scores: this rank's kept rollouts.
            share: rho, in (0, 1].
            reduce: reduction over the data-parallel ranks.
        """
        assert scores is not None, "entropies rank the tokens: scoring comes first"
        lengths = [len(sample.response_ids) for sample in samples]
        uids = torch.tensor([sample.uid for sample in samples], dtype=torch.int64)
        counts = torch.tensor(lengths, dtype=torch.int64)
        keys = (ops.mix64(seed, step, uids) if len(uids) else uids).repeat_interleave(counts)
        position = torch.cat([torch.zeros(0, dtype=torch.int64)] + [torch.arange(length) for length in lengths])
        if self.by == "chance":
            ranked = _chance(keys, position)
        elif self.by == "entropy":
            ranked = settle_ties(_per_token([score.entropy for score in scores]).float())
        else:
            signal = [abs(s.advantage) * score.entropy for s, score in zip(samples, scores, strict=True)]
            ranked = settle_ties(_per_token(signal).float())
        mask = ops.top_share(ranked, share, keys, position, reduce)
        return Ragged(mask, tuple(lengths))


def _chance(keys: Tensor, position: Tensor) -> Tensor:
    """[n] float32 in [0, 1), a hash of (seed, step, uid) and position: the same draw on every layout."""
    draw = ops.mix64(keys, position, CHANCE) if len(keys) else keys
    return ((draw >> 40) & 0xFFFFFF).float() / (1 << 24)  # 24 bits, which a float32 holds exactly
