"""Lays per-sample values out along the scored rows of a packed micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from d3s_megatron.types import LossBatch, Sample, Scores, TokenBatch


@dataclass(frozen=True)
class StepTensors:
    """One rank's samples of one optimizer step; every list has one entry [L] per sample."""

    samples: Sequence[Sample]
    scores: Sequence[Scores]
    keep: Sequence[Tensor]  # bool, the selected tokens
    scored: Sequence[Tensor]  # bool, the tokens whose log-probs the loss reads: keep, or more
    weights: Sequence[Tensor]
    kl_weights: Sequence[Tensor]

    def loss_batch(self, row: TokenBatch, device: torch.device | str = "cpu") -> LossBatch:
        """The LossBatch of one packed row of these samples."""

        def lay_out(value: Callable[[int], Tensor]) -> Tensor:
            parts = [value(i)[self.scored[i]] for i in row.samples]
            return torch.cat(parts).to(device) if parts else torch.zeros(0, device=device)

        refs = [score.ref_log_probs for score in self.scores if score.ref_log_probs is not None]
        assert len(refs) in (0, len(self.scores)), "a reference is scored for all samples or for none"
        return LossBatch(
            old_log_probs=lay_out(lambda i: self.scores[i].old_log_probs),
            rollout_log_probs=lay_out(lambda i: torch.tensor(self.samples[i].rollout_log_probs)),
            ref_log_probs=lay_out(lambda i: refs[i]) if refs else None,
            advantages=lay_out(lambda i: torch.full((len(self.keep[i]),), self.samples[i].advantage)),
            keep=lay_out(lambda i: self.keep[i]).bool(),
            weights=lay_out(lambda i: self.weights[i]),
            kl_weights=lay_out(lambda i: self.kl_weights[i]),
            sequence=row.sequence.to(device),
            num_sequences=max(1, len(row.samples)),
        )
