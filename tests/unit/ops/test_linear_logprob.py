import pytest
import torch

from d3s_megatron.ops import backend, extension, linear_logprob, logprob_entropy

BACKENDS = ["reference"] + (["extension"] if extension.why_missing() is None else [])


@pytest.fixture(params=BACKENDS, autouse=True)
def each_backend(request):
    with backend(request.param):
        yield


def inputs(dtype=torch.float32, num=7, width=12, vocab=37):
    g = torch.Generator().manual_seed(0)
    h, w = torch.randn(num, width, generator=g), torch.randn(vocab, width, generator=g)
    return h.to(dtype).requires_grad_(), w.to(dtype).requires_grad_(), torch.randint(0, vocab - 4, (num,), generator=g)


@pytest.mark.parametrize("tile", [1, 5, 16, 33, 100])
@pytest.mark.parametrize("entropy_grad", [False, True])
def test_equals_the_logits_way(tile, entropy_grad):
    h, w, y = inputs()
    kw = dict(temperature=0.8, vocab_size=33, entropy_grad=entropy_grad)
    got = linear_logprob(h, w, y, tile=tile, **kw)
    want = logprob_entropy(h @ w.t(), y, **kw)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    mix = lambda out: (out[0] * y).sum() + out[1].sum() * entropy_grad  # noqa: E731
    for a, b in zip(torch.autograd.grad(mix(got), (h, w)), torch.autograd.grad(mix(want), (h, w)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_gradcheck_in_float64():
    h, w, y = inputs(torch.float64, 3, 4, 11)
    with backend("reference"):
        f = lambda h, w: linear_logprob(h, w, y, vocab_size=10, entropy_grad=True, tile=4)  # noqa: E731
        assert torch.autograd.gradcheck(f, (h, w))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_gradient_is_added(dtype):
    h, w, y = inputs(dtype)
    total = torch.ones(w.shape)
    (linear_logprob(h, w, y, tile=10)[0].sum()).backward()
    plain, w.grad = w.grad.float(), None
    linear_logprob(h, w, y, weight_grad=total, tile=10)[0].sum().backward()
    assert w.grad is None
    torch.testing.assert_close(total, 1 + plain, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-2)


def test_refusals():
    h, w, y = inputs()
    with pytest.raises(ValueError, match=r"\[V_tp, H\]"):
        linear_logprob(h, w.t(), y)
    with pytest.raises(ValueError, match="bfloat16"):
        linear_logprob(h, w.bfloat16(), y)
    with pytest.raises(ValueError, match="weight_grad"):
        linear_logprob(h, w, y, weight_grad=torch.zeros(3))


def test_weight_grad_of_bf16_is_not_rounded():
    """A product in bfloat16 before the sum would leave only values that bfloat16 has."""
    h, w, y = inputs(torch.bfloat16, 40, 16, 64)
    total = torch.zeros(w.shape)
    lp, _ = linear_logprob(h, w, y, weight_grad=total)
    lp.sum().backward()
    assert (total.bfloat16().float() != total).float().mean() > 0.9
    exact_h, exact_w = h.detach().double(), w.detach().double().requires_grad_()
    exact, _ = linear_logprob(exact_h, exact_w, y)
    exact.sum().backward()
    torch.testing.assert_close(total.double(), exact_w.grad, rtol=0.02, atol=0.02)
