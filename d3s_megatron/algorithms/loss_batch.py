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
    def _columns(self) -> dict[str, Tensor | None]:
        """Each value of a LossBatch for all response tokens, laid end to end."""
        none = torch.zeros(0)
        scores = self.scores or ()
        refs = [score.ref_log_probs for score in scores if score.ref_log_probs is not None]
        assert len(refs) in (0, len(scores)), "a reference is scored for all samples or for none"
        lengths = torch.tensor([len(mask) for mask in self.keep], dtype=torch.int64)
        advantages = torch.tensor([sample.advantage for sample in self.samples])
        return {
            "old_log_probs": None if self.scores is None else torch.cat([none, *(s.old_log_probs for s in scores)]),
            "rollout_log_probs": torch.tensor([p for sample in self.samples for p in sample.rollout_log_probs]),
            "ref_log_probs": torch.cat(refs) if refs else None,
            "advantages": advantages.repeat_interleave(lengths),
            "keep": Ragged.of(self.keep, torch.bool).flat,
            "weights": Ragged.of(self.weights).flat,
            "kl_weights": Ragged.of(self.kl_weights).flat,
        }

    def loss_batch(self, row: TokenBatch, device: torch.device | str = "cpu") -> LossBatch:
        """The LossBatch of one packed row of these samples."""
        index = row.token_index
        return LossBatch(
            **{name: None if all_ is None else all_[index].to(device) for name, all_ in self._columns.items()},
            sequence=row.sequence.to(device),
            num_sequences=max(1, len(row.samples)),
        )
