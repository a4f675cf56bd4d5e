"""The four loss normalisations of method 1.10 as one weight per token, c_i / Z, with every count global."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from d3s_megatron.types import Reduce


def token_weights(kind: str, keep: Sequence[Tensor], max_length: int, reduce: Reduce) -> list[Tensor]:
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
        reduce: sum over the data-parallel ranks; every rank divides by the same Z (faults D07, D08, D10).
    """
    counts = torch.tensor(
        [sum(int(mask.sum()) for mask in keep), sum(bool(mask.any()) for mask in keep), len(keep)],
        dtype=torch.int64,
    )
    num_tokens, num_nonempty, num_samples = reduce(counts, "sum").clamp(min=1).tolist()
    total = {
        "token_mean": num_tokens,
        "seq_mean_selected": num_nonempty,
        "seq_mean_full": num_samples,
        "dr_grpo": num_samples * max_length,
    }[kind]
    per_sample = {
        "token_mean": lambda mask: 1.0,
        "seq_mean_selected": lambda mask: 1.0 / max(1, int(mask.sum())),
        "seq_mean_full": lambda mask: 1.0 / len(mask),
        "dr_grpo": lambda mask: 1.0,
    }[kind]
    return [mask.float() * (per_sample(mask) / total) for mask in keep]
