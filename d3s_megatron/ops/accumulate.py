"""Linear layer and embedding whose backward adds the weight's gradient to a float32 buffer, with none made in between.

Of a vocabulary's matrix the gradient is the largest tensor of an update. Made by autograd it is cleared or written,
added to the other gradient of a tied weight, and added to the buffer, whatever the number of tokens; here it costs
what its tokens cost.

Shapes: T rows, V rows of the weight, H its width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

STRETCH = 1 << 24  # elements of a wide copy held at once: 64 MiB of float32


def linear(x: Tensor, weight: Tensor, weight_grad: Tensor) -> Tensor:
    """x [T, H] @ weight [V, H].T -> [T, V]; backward adds d weight to `weight_grad` [V, H], and autograd gets none."""
    return _Linear.apply(x, weight, weight_grad)


def embedding(rows: Tensor, weight: Tensor, weight_grad: Tensor) -> Tensor:
    """Rows [...] int64 of weight [V, H] -> [..., H], zeros for row -1; backward adds to `weight_grad`, as `linear`."""
    return _Embedding.apply(rows, weight, weight_grad)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total [M, N] += a [M, K] @ b [K, N]; with a wide total the product is not rounded to the dtype of its factors."""
    if a.dtype == total.dtype:
        torch.addmm(total, a, b, out=total)
        return
    if not a.is_cuda:
        b = b.to(total.dtype)
    step = max(1, STRETCH // max(1, *a.shape[1:], *b.shape[1:]))
    for start in range(0, len(total), step):
        part, factor = total[start : start + step], a[start : start + step]
        if a.is_cuda:
            part += torch.mm(factor, b, out_dtype=total.dtype)
        else:
            torch.addmm(part, factor.to(total.dtype), b, out=part)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, weight_grad: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight_grad = weight_grad  # not saved: others add to it in the meantime
        return x @ weight.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            add_product(ctx.weight_grad, grad.t(), x)
        return (grad @ weight if ctx.needs_input_grad[0] else None), None, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, weight_grad: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.weight_grad = weight_grad
        return weight[rows.clamp(min=0)].masked_fill_((rows < 0)[..., None], 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        (rows,) = ctx.saved_tensors
        here = rows >= 0
        ctx.weight_grad.index_add_(0, rows[here], grad[here].to(ctx.weight_grad.dtype))
        return None, None, None
