"""The four loss normalisations of method 1.10 as one weight per token, c_i / Z, with every count global."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from d3s_megatron.ragged import Ragged


def kept_counts(keep: Sequence[Tensor]) -> Tensor:
    """[kept tokens, samples with at least one, samples] of this rank, int64; what Z is made of, summed over ranks."""
    num_kept = _num_kept(Ragged.of(keep, torch.bool))
    return torch.stack([num_kept.sum(), (num_kept > 0).sum(), torch.tensor(len(keep))])


def _num_kept(keep: Ragged) -> Tensor:
    return torch.bincount(keep.owner[keep.flat], minlength=len(keep))  # [n]


def token_weights(kind: str, keep: Sequence[Tensor], max_length: int, counts: Tensor) -> Ragged:
    """Per sample the weights [L] float32 with which its token losses enter the sum; 0 where dropped.

    | kind              | c_i         | Z                                   |
    |-------------------|-------------|-------------------------------------|
    | token_mean        | 1           | kept tokens                         |
    | seq_mean_selected | 1 / |T_i|   | samples with at least one kept token |
    | seq_mean_full     | 1 / |y_i|   | samples                             |
    | dr_grpo           | 1           | samples x max_length                |

    Args:
        keep: this rank's samples of one optimizer step, their kept tokens [L] bool.
        max_length: the longest answer that may be generated.
        counts: [3], the sum of every rank's `kept_counts`; every rank divides by the same Z (faults D07, D08, D10).
    """
    keep = Ragged.of(keep, torch.bool)
    num_kept, lengths = _num_kept(keep), torch.tensor(keep.lengths, dtype=torch.int64)
    num_tokens, num_nonempty, num_samples = counts.clamp(min=1).tolist()
    total = {
        "token_mean": num_tokens,
        "seq_mean_selected": num_nonempty,
        "seq_mean_full": num_samples,
        "dr_grpo": num_samples * max_length,
    }[kind]
    per_sample = {"seq_mean_selected": num_kept.clamp(min=1), "seq_mean_full": lengths}.get(kind)
    coefficient = torch.ones(len(keep), dtype=torch.float64) if per_sample is None else 1.0 / per_sample.double()
    return Ragged(keep.flat * (coefficient / total).float()[keep.owner], keep.lengths)
