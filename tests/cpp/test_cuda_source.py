"""The CUDA kernels' own source, compiled for the host with a block and warp emulator, against the torch references."""

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import d3s_megatron.ops  # noqa: F401  makes the submodules below importable by name
from d3s_megatron.ops import backend, cuda, max_variance_subset, row_stats, top_share_cut

ROOT = Path(__file__).resolve().parents[2]
share = sys.modules["d3s_megatron.ops.top_share"]
I64, F32 = ctypes.c_int64, ctypes.c_float


class HostKernels:
    """The interface of the compiled module's `cuda` part, over the emulated kernels and CPU tensors."""

    def __init__(self, library):
        self.library = library

    def __getattr__(self, name):
        function = getattr(self.library, name)

        def call(*args):
            function(*(ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else a for a in args))

        return call

    def max_variance(self, values, key, order, borders, items_at, m, items, sums, mask, status):
        call = self.__getattr__("max_variance")
        call(values, key, order, borders, items_at, I64(len(borders) - 1), I64(m), items, sums, mask, status)

    def share_histogram(self, scores, uid, position, level, shift, bits, state, counts):
        call = self.__getattr__("share_histogram")
        call(scores, uid, position, I64(len(scores)), level, shift, bits, state, counts)

    def share_mask(self, scores, uid, position, state, mask):
        self.__getattr__("share_mask")(scores, uid, position, I64(len(scores)), state, mask)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not on this machine")
    out = tmp_path_factory.mktemp("kernels") / "kernels.so"
    source = ROOT / "tests/cpp/kernels_on_host.cpp"
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-w", f"-I{ROOT}/csrc/include", f"-I{ROOT}/tests/cpp"]
    subprocess.run([compiler, *flags, str(source), "-o", str(out)], check=True)
    return HostKernels(ctypes.CDLL(str(out)))


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def rows(dtype, num, vocab, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(num, vocab, generator=g).mul(4)
    x[0, torch.randint(0, vocab, (1,), generator=g)] += 20
    if vocab > 3:
        x[1, ::2] = -torch.inf
    return x.to(dtype), torch.randint(-1, vocab, (num,), generator=g)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 2, 7, 8, 9, 33, 511, 512, 4097, 17_001])
def test_row_kernels(kernels, dtype, vocab):
    x, y = rows(dtype, 3, vocab, vocab)
    wide = torch.empty(3, vocab + 3, dtype=dtype)  # odd strides: rows start off the 16-byte border
    wide[:, 3:] = x
    kind, c, valid = DTYPES.index(dtype), 0.8, max(1, vocab - 2)
    y = y.clamp(max=valid - 1)
    for view in (x, wide[:, 3:]):
        stats = torch.empty(4, 3)
        kernels.row_stats(kind, view, y, I64(3), I64(view.stride(0)), I64(valid), F32(c), stats)
        want = row_stats.reference_stats(view, y, valid, c)
        torch.testing.assert_close(stats, want, rtol=2e-6, atol=1e-7)
        _, entropy, m, log_z = row_stats.combine(stats[None], torch.zeros(3, dtype=torch.int64), c)
        gl, gh = torch.tensor([1.0, -0.5, 2.0]), torch.tensor([0.3, 0.7, -1.0])
        for grad_h in (None, gh):
            want = torch.empty_like(view)
            row_stats.reference_backward(view, want, y, valid, c, (m, log_z, entropy), gl, grad_h)
            for out in (torch.empty_like(x), view.clone()):  # another buffer, and over the logits
                source = out if out.shape == view.shape and torch.equal(out, view) else view
                strides = (I64(source.stride(0)), I64(out.stride(0)), I64(vocab), I64(valid))
                null = ctypes.c_void_p(0) if grad_h is None else grad_h
                kernels.row_backward(kind, source, out, y, I64(3), *strides, F32(c), m, log_z, entropy, gl, null)
                rtol = 1e-5 if dtype == torch.float32 else 1e-2
                torch.testing.assert_close(out, want, rtol=rtol, atol=1e-6)


def test_row_kernel_keeps_nan(kernels):
    x, y = torch.zeros(3, 600), torch.zeros(3, dtype=torch.int64)
    x[0, 599], x[1, 3], x[2, :] = torch.nan, torch.inf, -torch.inf
    x[2, 300] = torch.nan
    stats = torch.empty(4, 3)
    kernels.row_stats(0, x, y, I64(3), I64(600), I64(600), F32(1.0), stats)
    assert stats[1].isnan().all()


@pytest.mark.parametrize("n", [1, 2, 3, 31, 64, 65, 300, 1025])
@pytest.mark.parametrize("kind", ["normal", "binary", "lattice", "equal"])
def test_variance_kernel(kernels, n, kind):
    g = torch.Generator().manual_seed(n)
    values = torch.randn(n, generator=g, dtype=torch.float64)
    values = {"normal": values, "binary": (values > 0.3).double(), "lattice": values.mul(2).round(),
              "equal": torch.full((n,), 0.1, dtype=torch.float64)}[kind]  # fmt: skip
    key = torch.randperm(n, generator=g)
    segments = torch.randint(-2, 3, (n,), generator=g)
    for m in {0, 1, 2, n // 4, n // 2, n - 1, n}:
        with backend("reference"):
            whole, parts = max_variance_subset(values, m, key), max_variance_subset(values, m, key, segments)
        assert torch.equal(cuda.select_variance(kernels, values, m, key, None), whole)
        assert torch.equal(cuda.select_variance(kernels, values, m, key, segments), parts)


@pytest.mark.parametrize("n", [1, 5, 255, 257, 5000])
@pytest.mark.parametrize("kind", ["random", "zeros", "lattice", "constant"])
@pytest.mark.parametrize("rho", [0.01, 0.3, 1.0])
def test_share_kernels(kernels, n, kind, rho):
    g = torch.Generator().manual_seed(n)
    base = torch.randn(n, generator=g)
    scores = {"random": base, "zeros": base * (base > 1), "lattice": base.mul(2).round(),
              "constant": torch.full((n,), -0.0)}[kind]  # fmt: skip
    uid = torch.randint(-(1 << 63), (1 << 63) - 1, (7,), generator=g)[torch.arange(n) % 7]
    position = torch.arange(n) // 7 - 3
    with backend("reference"):
        want = top_share_cut(scores, rho, uid, position)
    cut, mask = share.device_select(kernels, scores, rho, uid, position, lambda t, how: t, True)
    assert cut == want
    assert torch.equal(mask, want.mask(scores, uid, position))


def test_share_kernels_refuse_nan(kernels):
    ids = torch.arange(3)
    with pytest.raises(ValueError, match="1 NaN and 1 infinite values among 3"):
        scores = torch.tensor([torch.nan, 1.0, torch.inf])
        share.device_select(kernels, scores, 0.5, ids, ids, lambda t, how: t, True)


def test_nvcc_takes_them_without_spills(tmp_path):
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not on this machine")
    targets = [f"-gencode=arch=compute_{sm},code=sm_{sm}" for sm in (80, 90)]
    flags = ["-O3", "-std=c++17", "--threads", "2", "-Xptxas", "-v", f"-I{ROOT}/csrc/include", f"-I{ROOT}/csrc/cuda"]
    files = ["-c", str(ROOT / "csrc/cuda/kernels.cu"), "-o", str(tmp_path / "kernels.o")]
    said = subprocess.run([nvcc, *flags, *targets, *files], capture_output=True, text=True, check=True)
    lines = [line for line in (said.stdout + said.stderr).splitlines() if "spill" in line or "registers" in line]
    assert len(lines) >= 2 * 2 * 10  # ten kernels, two architectures
    assert all("0 bytes spill stores, 0 bytes spill loads" in line for line in lines if "spill" in line), lines
    print("\n".join(lines))
