"""Every op on a GPU against float64 or the CPU path; run by tests/gpu/run.sh, skipped where there is no GPU."""

import pytest
import torch

from d3s_megatron.ops import (
    backend,
    extension,
    linear_logprob,
    logprob_entropy,
    max_variance_subset,
    top_share,
    top_share_cut,
)
from d3s_megatron.ops.cuda import select_share, select_variance

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
BACKENDS = ["reference"]
if extension.why_missing() is None and hasattr(extension.module(), "cuda"):
    BACKENDS.append("extension")


@pytest.fixture(params=BACKENDS, autouse=True)
def each_backend(request):
    with backend(request.param):
        yield


def test_the_kernels_were_built():
    assert "extension" in BACKENDS, (
        "build with nvcc on PATH: D3S_CUDA=1 pip install -e . --no-build-isolation --no-deps"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [1, 33, 4099, 151_936])
@pytest.mark.parametrize("overwrite", [False, True])
def test_logprob_entropy(dtype, vocab, overwrite):
    g = torch.Generator().manual_seed(vocab)
    x = torch.randn(65, vocab, generator=g).mul(3)
    x[torch.arange(65), torch.randint(0, vocab, (65,), generator=g)] += torch.linspace(0, 30, 65)
    x, y = x.to(dtype).cuda(), torch.randint(0, vocab, (65,), generator=g).cuda()
    exact = x.double().requires_grad_()
    log_p = (exact / 0.8).log_softmax(-1)
    want_lp = log_p.gather(1, y[:, None])[:, 0]
    want_h = -torch.where(log_p.exp() > 0, log_p.exp() * log_p, 0.0).sum(-1)
    (want_lp.sum() + 0.5 * want_h.sum()).backward()
    logits = x.clone().requires_grad_() * 1
    lp, h = logprob_entropy(logits, y, temperature=0.8, entropy_grad=True, overwrite_logits=overwrite)
    (grad,) = torch.autograd.grad(lp.sum() + 0.5 * h.sum(), logits)
    torch.testing.assert_close(lp.double(), want_lp, rtol=2e-6, atol=2e-6)
    sure = want_h >= 1e-6
    assert ((h - want_h).abs() / want_h)[sure].max() <= 1e-6 if sure.any() else True
    assert h.min() >= 0
    tolerance = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(grad.double(), exact.grad, rtol=tolerance, atol=2e-6 if dtype != torch.float16 else 1e-5)


def test_linear_logprob():
    g = torch.Generator().manual_seed(0)
    h, w = torch.randn(300, 64, generator=g).cuda(), torch.randn(5000, 64, generator=g).cuda()
    y = torch.randint(0, 5000, (300,), generator=g).cuda()
    h.requires_grad_(), w.requires_grad_()
    got, want = linear_logprob(h, w, y, entropy_grad=True), logprob_entropy(h @ w.t(), y, entropy_grad=True)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)
    for a, b in zip(
        torch.autograd.grad(sum(got).sum(), (h, w)), torch.autograd.grad(sum(want).sum(), (h, w)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("n", [2, 1000, 16_384])
def test_max_variance(n):
    g = torch.Generator().manual_seed(n)
    values, key = torch.randn(n, generator=g, dtype=torch.float64).mul(2).round(), torch.randperm(n, generator=g)
    segments = torch.randint(0, max(1, n // 16), (n,), generator=g)
    for m in (1, n // 3, n - 1):
        got = max_variance_subset(values.cuda(), m, key.cuda())
        parts = max_variance_subset(values.cuda(), min(m, 5), key.cuda(), segments.cuda())
        assert torch.equal(got.cpu(), max_variance_subset(values, m, key))
        assert torch.equal(parts.cpu(), max_variance_subset(values, min(m, 5), key, segments))


@pytest.mark.parametrize("n", [1, 1000, 8_400_000])
@pytest.mark.parametrize("zeros", [0.0, 0.9])
def test_top_share(n, zeros):
    g = torch.Generator().manual_seed(n)
    scores = torch.rand(n, generator=g) * (torch.rand(n, generator=g) >= zeros)
    uid, position = torch.arange(n) // 8192 * -7919, torch.arange(n) % 8192
    on_gpu = (scores.cuda(), 0.2, uid.cuda(), position.cuda())
    assert torch.equal(top_share(*on_gpu).cpu(), top_share(scores, 0.2, uid, position))
    assert top_share_cut(*on_gpu) == top_share_cut(scores, 0.2, uid, position)


def test_selections_are_captured_in_cuda_graphs():
    """Nothing is read back on the way: a graph of the whole selection, replayed on other values, picks theirs."""
    if extension.why_missing() is not None or not hasattr(extension.module(), "cuda"):
        pytest.skip("the kernels were not built")
    n, k, kernels = 100_000, 20_000, extension.module().cuda
    scores, values = torch.rand(n, device="cuda"), torch.randn(4096, device="cuda", dtype=torch.float64)
    uid, position, key = torch.zeros(n, device="cuda").long(), torch.arange(n, device="cuda"), torch.arange(4096).cuda()
    mask = torch.zeros(n, dtype=torch.bool, device="cuda")

    def both():
        select_share(kernels, scores, uid, position, k, n, lambda counts, how: counts, mask)
        return select_variance(kernels, values, 1000, key, None)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        both()  # allocations and library set-up happen before the capture
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chosen = both()
    scores.copy_(torch.rand(n)), values.copy_(torch.randn(4096, dtype=torch.float64))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(mask.cpu(), top_share(scores.cpu(), k / n, uid.cpu(), position.cpu()))
    assert torch.equal(chosen.cpu(), max_variance_subset(values.cpu(), 1000, key.cpu()))
