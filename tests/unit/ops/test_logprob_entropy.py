import math

import pytest
import torch

from d3s_megatron.ops import backend, extension, logprob_entropy

BACKENDS = ["reference"] + (["extension"] if extension.why_missing() is None else [])


@pytest.fixture(params=BACKENDS, autouse=True)
def each_backend(request):
    with backend(request.param):
        yield


def truth(logits, targets, temperature=1.0, vocab_size=None):
    """Float64 log-softmax over the true vocabulary."""
    log_p = (logits.double()[:, :vocab_size] / temperature).log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -torch.where(log_p.exp() > 0, log_p.exp() * log_p, 0.0).sum(-1)


def exact_gradient(logits, targets, grad_lp, grad_h, temperature, vocab_size):
    """d (grad_lp . log_prob + grad_h . entropy) / d logits in float64."""
    log_p = (logits.double()[:, :vocab_size] / temperature).log_softmax(-1)
    p, (_, h) = log_p.exp(), truth(logits, targets, temperature, vocab_size)
    d = -p * grad_lp[:, None] - grad_h[:, None] * torch.where(p > 0, p * (log_p + h[:, None]), 0.0)
    d[torch.arange(len(d)), targets] += grad_lp
    return torch.nn.functional.pad(d / temperature, (0, logits.shape[1] - d.shape[1]))


def rows(num, vocab, seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(num, vocab, generator=g).mul(3).to(dtype), torch.randint(0, vocab, (num,), generator=g)


def test_known_values():
    x = torch.tensor([[2.0, 1.0, 0.0]])
    kept = x.clone()
    lp, h = logprob_entropy(x, torch.tensor([0]))
    assert lp.item() == pytest.approx(-0.407606, abs=1e-6) and h.item() == pytest.approx(0.832396, abs=1e-6)
    assert torch.equal(x, kept)
    lp, _ = logprob_entropy(x, torch.tensor([0]), temperature=0.5)
    assert lp.item() == pytest.approx(-0.142932, abs=1e-6)


def test_shift_far_below_zero():
    _, h = logprob_entropy(torch.tensor([[-200.0, -201.0]]), torch.tensor([0]))
    assert h.item() == pytest.approx(0.582203, abs=1e-6)


def test_padded_columns_have_no_mass():
    x = torch.tensor([[-4.0] * 5 + [0.0] * 3], requires_grad=True)
    lp, h = logprob_entropy(x, torch.tensor([2]), vocab_size=5)
    assert lp.item() == pytest.approx(-1.609438, abs=1e-6) and h.item() == pytest.approx(1.609438, abs=1e-6)
    lp.sum().backward()
    assert x.grad[0, 5:].tolist() == [0, 0, 0] and x.grad[0, 2].item() == pytest.approx(0.8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [1, 2, 7, 8, 15, 16, 17, 33, 255, 4096, 4099, 20_011])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_against_float64(dtype, vocab, temperature):
    x, y = rows(5, vocab, vocab, dtype)
    lp, h = logprob_entropy(x, y, temperature=temperature)
    want_lp, want_h = truth(x, y, temperature)
    torch.testing.assert_close(lp.double(), want_lp, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(h.double(), want_h, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("offset", [-100.0, 0.0, 100.0])
def test_entropy_does_not_cancel(offset):
    """Relative error at most 1e-6 for every entropy of at least 1e-6, and none below zero."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(512, 1024, generator=g)
    x[torch.arange(512), torch.randint(0, 1024, (512,), generator=g)] += torch.linspace(0, 34, 512)
    x = x + offset  # rounding of the sum is part of the input
    for temperature in (1.0, 0.6):
        _, h = logprob_entropy(x, torch.zeros(512, dtype=torch.int64), temperature=temperature)
        _, want = truth(x, torch.zeros(512, dtype=torch.int64), temperature)
        sure = want >= 1e-6
        assert sure.sum() > 200 and h.min() >= 0
        assert ((h - want).abs() / want)[sure].max() <= 1e-6


def test_masked_entries():
    x, y = rows(4, 50)
    x[:, 10:] = -math.inf
    x[1, :9] = -math.inf
    y = torch.tensor([3, 9, 4, 11])
    lp, h = logprob_entropy(x, y)
    want_lp, want_h = truth(x, y)
    torch.testing.assert_close(lp.double(), want_lp, rtol=1e-6, atol=1e-6)
    assert lp[1] == 0 and h[1] == 0 and lp[3] == -math.inf
    torch.testing.assert_close(h.double(), want_h, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_logits_are_not_hidden(bad):
    x, y = rows(3, 40)
    x[1, 33] = bad
    lp, h = logprob_entropy(x, y)
    assert lp.isnan().tolist() == h.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [1, 7, 16, 33, 4099])
@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("overwrite", [False, True])
def test_gradients(dtype, vocab, entropy_grad, overwrite):
    x, y = rows(6, vocab + 3, vocab, dtype)
    x[2, 0] = -math.inf if vocab > 1 else 0.0
    y = y.clamp(max=vocab - 1)
    g = torch.Generator().manual_seed(5)
    gl, gh = torch.randn(6, generator=g), torch.randn(6, generator=g) * entropy_grad
    y[2] = vocab - 1  # row 2 starts with a masked entry
    want = exact_gradient(x, y, gl, gh, 0.8, vocab)
    leaf = x.clone().requires_grad_()
    logits = leaf * 1
    lp, h = logprob_entropy(
        logits, y, temperature=0.8, vocab_size=vocab, entropy_grad=entropy_grad, overwrite_logits=overwrite
    )
    assert h.requires_grad == entropy_grad
    loss = (lp * gl).sum() + ((h * gh).sum() if entropy_grad else 0)
    (grad,) = torch.autograd.grad(loss, logits)
    assert grad.dtype == dtype and (grad.data_ptr() == logits.data_ptr()) == overwrite
    tol = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    torch.testing.assert_close(grad.double(), want, rtol=tol, atol=1e-6 if dtype != torch.float16 else 1e-5)


def test_gradcheck_in_float64():
    x, y = rows(4, 9)
    x = x.double().requires_grad_()
    with backend("reference"):
        f = lambda x: logprob_entropy(x, y, temperature=0.7, vocab_size=8, entropy_grad=True)  # noqa: E731
        y = y.clamp(max=7)
        assert torch.autograd.gradcheck(f, (x,))


def test_overwriting_is_noticed_by_others():
    x, y = rows(3, 20)
    leaf = x.requires_grad_()
    logits = leaf * 1
    other = (logits * logits).sum()  # saves the logits for its own backward
    lp, _ = logprob_entropy(logits, y, overwrite_logits=True)
    lp.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace operation"):
        other.backward()
    with pytest.raises(RuntimeError, match="inplace operation"):
        lp.sum().backward()


def test_fp32_logits_of_the_caller_stay(tmp_path):
    leaf = torch.tensor([[1.0, 2.0, 3.0]], requires_grad=True)
    logits = leaf * 2
    a, _ = logprob_entropy(logits, torch.tensor([0]))
    b, _ = logprob_entropy(logits, torch.tensor([2]))
    (a + b).sum().backward()
    want = torch.tensor([[1.0, 2.0, 3.0]], requires_grad=True)
    lp = (want * 2).log_softmax(-1)
    (lp[0, 0] + lp[0, 2]).backward()
    torch.testing.assert_close(leaf.grad, want.grad)


def test_rows_of_a_wider_buffer():
    wide = torch.randn(6, 48)
    y = torch.tensor([1, 5, 30, 0, 2, 9])
    view = wide[:, 4:44]
    torch.testing.assert_close(logprob_entropy(view, y), logprob_entropy(view.contiguous(), y), rtol=0, atol=0)
    turned = torch.randn(40, 6).t()
    torch.testing.assert_close(logprob_entropy(turned, y), logprob_entropy(turned.contiguous(), y))


def test_no_rows():
    lp, h = logprob_entropy(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64))
    assert lp.shape == h.shape == (0,)


def test_refusals():
    x, y = rows(3, 20)
    for bad, match in [
        (dict(targets=y[:2]), r"int64 ids of shape \(3,\)"),
        (dict(targets=y.int()), "int32"),
        (dict(targets=torch.tensor([0, 20, 1])), r"targets\[1\]=20; ids run from 0 to 19"),
        (dict(temperature=0.0), "temperature=0.0"),
        (dict(vocab_size=21), "vocab_size=21"),
        (dict(logits=x.long()), "int64"),
        (dict(logits=x[0]), r"\(20,\)"),
        (dict(logits=x[:, :1].expand(3, 20), overwrite_logits=True), "overlap"),
    ]:
        with pytest.raises(ValueError, match=match):
            logprob_entropy(**({"logits": x, "targets": y} | bad))
