"""Log-prob of the target and entropy of every row of vocabulary-parallel logits, in one read."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import increment_version

from d3s_megatron.ops import row_stats
from d3s_megatron.ops.checks import is_real, is_whole, require, require_tensor

LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def logprob_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    entropy_grad: bool = False,
    overwrite_logits: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probs of the targets and entropies in nats: ([T], [T]) float32, bitwise equal on all tensor-parallel ranks.

    Args: logits [T, V_tp] float32, bfloat16 or float16: this rank's columns, shards equal and contiguous by rank;
    targets [T] int64, global ids; temperature > 0, applied in float32; vocab_size: columns with a global id from
    there on are padding and have no mass (None: all columns count); tp_group: the ranks that share a row.
    entropy_grad: let gradient flow through the entropy too (else it is a metric).
    overwrite_logits: backward puts the gradient where the logits were, so that training needs no second buffer.
    Whoever else saved these logits for its own backward then gets autograd's in-place error, never wrong numbers.
    The gradient is that of this rank's columns; every rank calls backward with the same incoming gradient.
    Raises ValueError on wrong shapes and dtypes, and on CPU for a target that is not in the vocabulary.
    """
    local, owner, num_valid = check(logits, targets, temperature, vocab_size, tp_group)
    if overwrite_logits:
        dense = logits.stride(1) == 1 and (len(logits) < 2 or logits.stride(0) >= logits.shape[1])
        require(dense, f"overwrite_logits needs rows that do not overlap; got strides {logits.stride()}")
    return _LogprobEntropy.apply(
        logits, local, owner, num_valid, 1.0 / temperature, tp_group, entropy_grad, overwrite_logits
    )


def check(
    logits: Tensor, targets: Tensor, temperature: float, vocab_size: int | None, tp_group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, int]:
    """Check the arguments; the target's column on this shard or -1 [T], the shard that has it [T], valid columns."""
    require_tensor("logits", logits)
    require(logits.dim() == 2, f"logits have shape {tuple(logits.shape)}; pass [tokens, vocabulary columns]")
    require(logits.dtype in LOGIT_DTYPES, f"logits have dtype {logits.dtype}; pass float32, bfloat16 or float16")
    require(logits.shape[1] > 0, f"logits have shape {tuple(logits.shape)}; a shard needs at least one column")
    return locate(targets, len(logits), logits.shape[1], logits.device, temperature, vocab_size, tp_group)


def locate(
    targets: Tensor,
    num_tokens: int,
    num_columns: int,
    device: torch.device,
    temperature: float,
    vocab_size: int | None,
    tp_group: dist.ProcessGroup | None,
) -> tuple[Tensor, Tensor, int]:
    """Where the targets lie among equal contiguous shards; see `check`."""
    require_tensor("targets", targets)
    require(
        targets.shape == (num_tokens,) and targets.dtype == torch.int64,
        f"targets are {targets.dtype} {tuple(targets.shape)}; pass int64 ids of shape ({num_tokens},)",
    )
    require(targets.device == device, f"targets are on {targets.device}, the logits on {device}; move them")
    ok = is_real(temperature) and 0.0 < temperature < float("inf")
    require(ok, f"temperature={temperature}; pass a positive number (1.0: as sampled)")
    rank, size = (0, 1) if tp_group is None else (dist.get_rank(tp_group), dist.get_world_size(tp_group))
    total = size * num_columns
    vocab = total if vocab_size is None else vocab_size
    ok = is_whole(vocab) and 0 < vocab <= total
    require(ok, f"vocab_size={vocab}; {size} shards of {num_columns} columns hold 1 to {total}")
    inside = (targets >= 0) & (targets < vocab)
    if device.type == "cpu":
        if not bool(inside.all()):
            at = int((~inside).nonzero()[0])
            raise ValueError(f"targets[{at}]={int(targets[at])}; ids run from 0 to {vocab - 1}")
    else:
        torch._assert_async(inside.all())  # no host sync; a wrong id stops the stream
    first = rank * num_columns
    local = targets - first
    local = torch.where((local >= 0) & (local < num_columns), local, -1)
    return local, targets // num_columns, min(max(vocab - first, 0), num_columns)


class _LogprobEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        local: Tensor,
        owner: Tensor,
        num_valid: int,
        inv_temperature: float,
        tp_group: dist.ProcessGroup | None,
        entropy_grad: bool,
        overwrite: bool,
    ) -> tuple[Tensor, Tensor]:
        stats = row_stats.stats(logits, local, num_valid, inv_temperature)
        shards = row_stats.gather_stats(stats, tp_group)
        log_prob, entropy, m, log_z = row_stats.combine(shards, owner, inv_temperature)
        ctx.save_for_backward(logits, local, m, log_z, entropy)
        ctx.settings = (num_valid, inv_temperature, entropy_grad, overwrite)
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return log_prob, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_log_prob: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        logits, local, m, log_z, entropy = ctx.saved_tensors  # raises where someone wrote over the logits
        num_valid, inv_temperature, entropy_grad, overwrite = ctx.settings
        out = logits if overwrite else torch.empty_like(logits)
        row_stats.backward(
            logits,
            out,
            local,
            num_valid,
            inv_temperature,
            (m, log_z, entropy),
            grad_log_prob.contiguous(),
            grad_entropy.contiguous() if entropy_grad else None,
        )
        if overwrite:
            increment_version(logits)  # autograd's own guard: other holders of the logits now raise
        return (out, *(None,) * 7)
