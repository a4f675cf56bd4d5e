"""SwiGLU for megatron-core's MLP: silu(gate) x up in one function, a cache's worth of rows at a time.

Written as separate calls it passes over [T, F] seven times and keeps silu(gate) for the backward pass; here only the
input is kept, and what is in between never leaves the cache. On a GPU all rows are one stretch.

Shapes: T tokens, F width of the MLP on this rank.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd.function import once_differentiable

STRETCH = 1 << 17  # elements of a half worked on at once: 512 KiB in float32


def _stretches(x: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """(rows, their gate, their up) of x [T, 2 F]."""
    num_rows, width = x.shape[0], x.shape[1] // 2
    step = max(1, num_rows if x.is_cuda else STRETCH // width)
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        yield rows, x[rows, :width], x[rows, width:]


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        flat = x.flatten(0, -2)
        out = x.new_empty(flat.shape[0], x.shape[-1] // 2)
        for rows, gate, up in _stretches(flat):
            torch.mul(F.silu(gate), up, out=out[rows])
        return out.view(*x.shape[:-1], out.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        flat, grad = x.flatten(0, -2), grad.flatten(0, -2)
        grad_x = torch.empty_like(flat)
        for (rows, gate, up), (_, grad_gate, grad_up) in zip(_stretches(flat), _stretches(grad_x), strict=True):
            torch.mul(grad[rows], F.silu(gate), out=grad_up)
            torch.ops.aten.silu_backward.grad_input(grad[rows] * up, gate, grad_input=grad_gate)
        return grad_x.view_as(x)


class SwiGlu(MegatronModule):
    """[..., 2 F] gates and ups -> [..., F]; the layer spec's activation, which megatron-core hands the whole input."""

    def __init__(self, config: TransformerConfig | None = None) -> None:
        super().__init__(config=config)

    def forward(self, x: Tensor) -> Tensor:
        return _SwiGlu.apply(x)
