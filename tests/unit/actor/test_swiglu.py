"""SwiGLU in stretches of rows against the plain expression."""

import pytest
import torch
import torch.nn.functional as F

from d3s_megatron.actor import swiglu


@pytest.mark.parametrize("shape", [(7, 1, 10), (1, 1, 2), (300, 1, 2000), (5, 3, 14), (0, 1, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_the_plain_expression(shape, dtype, monkeypatch):
    monkeypatch.setattr(swiglu, "STRETCH", 2048)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=g).to(dtype).requires_grad_()
    plain = x.detach().clone().requires_grad_()
    gate, up = plain.chunk(2, -1)
    ours, want = swiglu.SwiGlu()(x), F.silu(gate) * up
    torch.testing.assert_close(ours, want)
    grad = torch.randn(want.shape, generator=g).to(dtype)
    ours.backward(grad)
    want.backward(grad)
    torch.testing.assert_close(x.grad, plain.grad)


def test_gradient_by_finite_differences():
    x = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    assert torch.autograd.gradcheck(swiglu.SwiGlu(), x)
