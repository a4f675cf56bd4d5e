"""Gradients of the vocabulary's matrices straight into megatron-core's gradient buffer (`main_grad`).

As megatron-core's own fused layers do it: the gradient is added in the backward pass, the parameter says so, and its
hook, which counts parameters that are ready to be reduced, gets a stand-in to see. For embedding and output layer,
tied or not, this needs no kernel and works on any device.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import (
    VocabParallelEmbedding,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor
from torch.autograd.function import once_differentiable

from d3s_megatron.ops import accumulate


def weight_and_buffer(weight: Tensor) -> tuple[Tensor, Tensor | None]:
    """The weight to compute with, and where its gradient must be added; None where autograd is to make it."""
    buffer = getattr(weight, "main_grad", None)
    if buffer is None or not weight.requires_grad or not torch.is_grad_enabled():
        return weight, None
    return _AddedInPlace.apply(weight), buffer


class _AddedInPlace(torch.autograd.Function):
    """The weight itself; its consumers have no gradient for it, and the hooks behind it run nonetheless."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.weight = weight
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: None) -> Tensor | None:
        assert grad is None, "a gradient of this weight is on its way past the buffer"
        weight = ctx.weight
        weight.grad_added_to_main_grad = True
        weight.zero_out_wgrad = False  # "add the stand-in too", for tied weights; it is zero
        stand_in = torch.zeros((), dtype=weight.dtype, device=weight.device).expand_as(weight)
        if weight.is_cuda:
            return stand_in  # with None the hook would run in another thread than those of all other parameters
        weight.grad = stand_in
        return None


class Embedding(VocabParallelEmbedding):
    """megatron-core's embedding, whose gradient of V x H is never made: a token's is added to its row."""

    def forward(self, input_: Tensor) -> Tensor:
        """Token ids [b, T] -> [b, T, H], or [T / TP, b, H] under sequence parallelism."""
        weight, buffer = weight_and_buffer(self.weight)
        if buffer is None:
            return super().forward(input_)
        rows = input_ - self.vocab_start_index
        rows = torch.where((rows >= 0) & (rows < self.num_embeddings_per_partition), rows, -1)
        out = accumulate.embedding(rows, weight, buffer)
        if self.reduce_scatter_embeddings:
            return reduce_scatter_to_sequence_parallel_region(out.transpose(0, 1).contiguous(), group=self.tp_group)
        return reduce_from_tensor_model_parallel_region(out, group=self.tp_group)
