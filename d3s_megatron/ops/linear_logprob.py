"""Log-prob and entropy straight from hidden states, in vocabulary tiles: the logits are never made.

Tiles run over the vocabulary with all rows at once: a weight row is read once a sweep and its gradient is written
once. The cost is four matrix products (forward, the same again in backward, d hidden, d weight).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from d3s_megatron.ops import row_stats
from d3s_megatron.ops.accumulate import add_product
from d3s_megatron.ops.checks import is_whole, require, require_tensor
from d3s_megatron.ops.logprob_entropy import LOGIT_DTYPES, locate

TILE = 1024  # vocabulary columns a tile has: the scratch is T * TILE, and the product keeps a large M


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    entropy_grad: bool = False,
    weight_grad: Tensor | None = None,
    tile: int = TILE,
) -> tuple[Tensor, Tensor]:
    """As `logprob_entropy(hidden @ weight.T, targets, ...)`: ([T], [T]) float32, with one scratch tile for logits.

    Args: hidden [T, H], the same on every rank of tp_group (gather a sequence-parallel input first); weight [V_tp, H],
    this rank's rows of the output layer, same dtype; weight_grad [V_tp, H] float32: backward adds d weight there
    (Megatron's main_grad) and autograd gets none.
    The gradient of hidden is this rank's part: the sum over tp_group is the caller's (Megatron's
    copy-to or gather-from region does it in its backward).
    Logits of a tile are rounded to the inputs' dtype, as an output layer's are; all else is float32.
    """
    require_tensor("hidden", hidden)
    require_tensor("weight", weight)
    require(
        hidden.dim() == 2 and weight.dim() == 2 and hidden.shape[1] == weight.shape[1],
        f"hidden is {tuple(hidden.shape)}, weight {tuple(weight.shape)}; pass [T, H] and [V_tp, H]",
    )
    require(
        hidden.dtype == weight.dtype and hidden.dtype in LOGIT_DTYPES,
        f"hidden is {hidden.dtype}, weight {weight.dtype}; pass one floating dtype",
    )
    require(hidden.device == weight.device, f"hidden is on {hidden.device}, weight on {weight.device}; move one")
    require(is_whole(tile) and tile > 0, f"tile={tile}; pass a positive number of columns")
    if weight_grad is not None:
        require_tensor("weight_grad", weight_grad)
        require(
            weight_grad.shape == weight.shape and weight_grad.dtype == torch.float32,
            f"weight_grad is {weight_grad.dtype} {tuple(weight_grad.shape)}; pass float32 {tuple(weight.shape)}",
        )
    local, owner, num_valid = locate(
        targets, len(hidden), len(weight), hidden.device, temperature, vocab_size, tp_group
    )
    settings = (num_valid, 1.0 / temperature, tp_group, entropy_grad, tile)
    return _LinearLogprob.apply(hidden, weight, local, owner, weight_grad, settings)


def _tiles(num_valid: int, tile: int) -> list[tuple[int, int]]:
    return [(first, min(first + tile, num_valid)) for first in range(0, num_valid, tile)]


def _on_tile(local: Tensor, first: int, last: int) -> Tensor:
    return torch.where((local >= first) & (local < last), local - first, -1)


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        local: Tensor,
        owner: Tensor,
        weight_grad: Tensor | None,
        settings: tuple[int, float, dist.ProcessGroup | None, bool, int],
    ) -> tuple[Tensor, Tensor]:
        num_valid, c, tp_group, entropy_grad, tile = settings
        scratch = hidden.new_empty(len(hidden) * min(tile, max(num_valid, 1)))
        stats = row_stats.RunningStats(len(hidden), scratch[None])
        for first, last in _tiles(num_valid, tile):
            logits = scratch[: len(hidden) * (last - first)].view(len(hidden), last - first)
            torch.mm(hidden, weight[first:last].t(), out=logits)
            stats.add(logits, _on_tile(local, first, last), last - first, c)
        shards = row_stats.gather_stats(stats.result(), tp_group)
        log_prob, entropy, m, log_z = row_stats.combine(shards, owner, c)
        ctx.save_for_backward(hidden, weight, local, m, log_z, entropy)
        ctx.weight_grad, ctx.settings = weight_grad, settings
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return log_prob, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_log_prob: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, local, m, log_z, entropy = ctx.saved_tensors
        num_valid, c, _, entropy_grad, tile = ctx.settings
        num_tokens = len(hidden)
        grad_log_prob = grad_log_prob.contiguous()
        wanted_grad_entropy = grad_entropy.contiguous() if entropy_grad else None
        wide = row_stats.stats_dtype(hidden)
        want_hidden, want_weight = ctx.needs_input_grad[:2]
        # d hidden is a sum over tiles: in float32, so that the number of tiles does not show in it
        d_hidden = torch.zeros(hidden.shape, dtype=wide, device=hidden.device) if want_hidden else None
        d_weight = torch.empty_like(weight) if want_weight and ctx.weight_grad is None else None
        if d_weight is not None:
            d_weight[num_valid:] = 0
        scratch = hidden.new_empty(num_tokens * min(tile, max(num_valid, 1)))
        for first, last in _tiles(num_valid, tile):
            logits = scratch[: num_tokens * (last - first)].view(num_tokens, last - first)
            part = weight[first:last]
            torch.mm(hidden, part.t(), out=logits)
            saved = (m, log_z, entropy)
            on_tile = _on_tile(local, first, last)
            row_stats.backward(logits, logits, on_tile, last - first, c, saved, grad_log_prob, wanted_grad_entropy)
            if d_hidden is not None:
                add_product(d_hidden, logits, part)
            if d_weight is not None:
                torch.mm(logits.t(), hidden, out=d_weight[first:last])
            elif want_weight:
                add_product(ctx.weight_grad[first:last], logits.t(), hidden)
        return (None if d_hidden is None else d_hidden.to(hidden.dtype)), d_weight, None, None, None, None
