"""Lays per-sample values out along the scored rows of a packed micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from d3s_megatron.ragged import Ragged
from d3s_megatron.types import LossBatch, Sample, Scores, TokenBatch


@dataclass(frozen=True)
class StepTensors:
    """One rank's samples of one optimizer step; every list has one entry [L] per sample."""

    samples: Sequence[Sample]
    scores: Sequence[Scores] | None  # None: the update's own log-probs are the old ones too
    keep: Sequence[Tensor]  # bool, the selected tokens
    scored: Sequence[Tensor]  # bool, the tokens whose log-probs the loss reads: keep, or more
    weights: Sequence[Tensor]
    kl_weights: Sequence[Tensor]

    @cached_property
    def _all_tokens(self) -> LossBatch:
        """The LossBatch of all response tokens, laid end to end."""
        none = torch.zeros(0)
        scores = self.scores or ()
        refs = [score.ref_log_probs for score in scores if score.ref_log_probs is not None]
        assert len(refs) in (0, len(scores)), "a reference is scored for all samples or for none"
        keep = Ragged.of(self.keep, torch.bool)
        owner = keep.owner
        return LossBatch(
            old_log_probs=None if self.scores is None else torch.cat([none, *(s.old_log_probs for s in scores)]),
            rollout_log_probs=torch.tensor([p for sample in self.samples for p in sample.rollout_log_probs]),
            ref_log_probs=torch.cat(refs) if refs else None,
            advantages=torch.tensor([sample.advantage for sample in self.samples])[owner],
            keep=keep.flat,
            weights=Ragged.of(self.weights).flat,
            kl_weights=Ragged.of(self.kl_weights).flat,
            sequence=owner,
            num_sequences=len(self.samples),
        )

    def loss_batch(self, row: TokenBatch, device: torch.device | str = "cpu") -> LossBatch:
        """The LossBatch of one packed row of these samples."""
        every = self._all_tokens

        def at(values: Tensor) -> Tensor:
            return values[row.token_index].to(device)

        return LossBatch(
            old_log_probs=None if every.old_log_probs is None else at(every.old_log_probs),
            rollout_log_probs=at(every.rollout_log_probs),
            ref_log_probs=None if every.ref_log_probs is None else at(every.ref_log_probs),
            advantages=at(every.advantages),
            keep=at(every.keep),
            weights=at(every.weights),
            kl_weights=at(every.kl_weights),
            sequence=row.sequence.to(device),
            num_sequences=max(1, len(row.samples)),
        )
