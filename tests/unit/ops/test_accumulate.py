"""Gradients added to a buffer against those that autograd makes."""

import pytest
import torch
import torch.nn.functional as F

from d3s_megatron.ops import accumulate


@pytest.mark.parametrize("num", [0, 1, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_adds_to_what_is_there(num, dtype, monkeypatch):
    monkeypatch.setattr(accumulate, "STRETCH", 40)
    g = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 6, generator=g).to(dtype).requires_grad_() for n in (num, 23))
    grad, total = torch.randn(num, 23, generator=g).to(dtype), torch.ones(23, 6)
    want = x @ weight.t()
    (plain,) = torch.autograd.grad(want, x, grad)
    got = accumulate.linear(x, weight, total)
    got.backward(grad)
    assert torch.equal(got, want) and torch.equal(x.grad, plain) and weight.grad is None
    torch.testing.assert_close(total, 1 + grad.float().t() @ x.detach().float())  # nothing rounded to bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embedding_adds_every_token_to_its_row_and_none_elsewhere(dtype):
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(11, 6, generator=g).to(dtype).requires_grad_()
    rows = torch.tensor([[3, -1, 10, 3], [0, 3, -1, 10]])
    grad, total = torch.randn(2, 4, 6, generator=g).to(dtype), torch.ones(11, 6)
    wide = weight.detach().float().requires_grad_()
    want = F.embedding(rows.clamp(min=0), wide) * (rows >= 0)[..., None]
    want.backward(grad.float())
    got = accumulate.embedding(rows, weight, total)
    got.backward(grad)
    assert torch.equal(got.float(), want) and weight.grad is None
    torch.testing.assert_close(total, 1 + wide.grad)
