"""What only the compiled path can get wrong: instruction sets, threads, forks, large sizes, bad arguments."""

import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from d3s_megatron.ops import (
    backend,
    balanced_partition,
    extension,
    first_fit,
    group_advantages,
    linear_logprob,
    logprob_entropy,
    max_variance_subset,
    top_share,
)

pytestmark = pytest.mark.skipif(extension.why_missing() is not None, reason=f"no extension: {extension.why_missing()}")
ext = extension.module()


def logits(dtype, num=37, vocab=9001):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(num, vocab, generator=g).mul(3).to(dtype)
    x[0] = -torch.inf
    x[0, 5] = 1
    x[1, ::3] = -torch.inf
    return x, torch.randint(0, vocab, (num,), generator=g)


def run_logprob(x, y):
    x = x.clone().requires_grad_()
    lp, h = logprob_entropy(x, y, temperature=0.9, entropy_grad=True)
    lp.sum().add(h.sum()).backward()
    return lp.detach(), h.detach(), x.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_instruction_sets_agree(dtype):
    results = {}
    try:
        for name in ext.state()["supported"].split():
            ext.choose_instruction_set(name)
            results[name] = run_logprob(*logits(dtype))
    finally:
        ext.choose_instruction_set("")
    for got in results.values():
        for a, b in zip(got, results["base"], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-6)
    if "avx512" in results:
        for a, b in zip(results["avx512"], results["avx2"], strict=True):
            assert torch.equal(a, b)
    with pytest.raises(ValueError, match="sse9"):
        ext.choose_instruction_set("sse9")


@pytest.mark.parametrize("name", ext.state()["supported"].split() if ext else [])
def test_split_is_the_same_everywhere(name):
    g = torch.Generator().manual_seed(1)
    scores = torch.randn(300_007, generator=g)
    uid, position = torch.zeros(len(scores), dtype=torch.int64), torch.arange(len(scores))
    try:
        ext.choose_instruction_set(name)
        fast = top_share(scores, 0.2, uid, position)
    finally:
        ext.choose_instruction_set("")
    with backend("reference"):
        assert torch.equal(fast, top_share(scores, 0.2, uid, position))


@pytest.mark.parametrize("name", ext.state()["supported"].split() if ext else [])
@pytest.mark.parametrize("kind", ["normal", "heavy tails", "lattice"])
def test_max_variance_is_the_same_everywhere(name, kind):
    values = values_of(kind, 10_007, seed=4)
    key = torch.randperm(len(values), generator=torch.Generator().manual_seed(5))
    try:
        ext.choose_instruction_set(name)
        fast = [max_variance_subset(values, m, key) for m in (1, 40, 3000, 9000)]
        values[10_006] = torch.nan
        with pytest.raises(ValueError, match=r"values\[10006\]=nan"):
            max_variance_subset(values, 40, key)
        values[10_006] = -torch.inf
        with pytest.raises(ValueError, match=r"values\[10006\]=-inf"):
            max_variance_subset(values, 40, key)
    finally:
        ext.choose_instruction_set("")
    values = values_of(kind, 10_007, seed=4)
    with backend("reference"):
        for got, m in zip(fast, (1, 40, 3000, 9000), strict=True):
            assert torch.equal(got, max_variance_subset(values, m, key))


def all_ops():
    g = torch.Generator().manual_seed(2)
    n = 600_000
    scores = torch.randn(n, generator=g).mul(8).round()
    values = torch.randn(n, generator=g, dtype=torch.float64)
    uid = torch.randint(0, 50, (n,), generator=g)
    return (
        *run_logprob(*logits(torch.bfloat16, 60)),
        top_share(scores, 0.3, uid, torch.arange(n)),
        max_variance_subset(values, n // 3, uid),
    )


def test_threads_do_not_matter():
    had = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = all_ops()
        for num in (2, 3, 7):
            torch.set_num_threads(num)
            for a, b in zip(all_ops(), want, strict=True):
                assert torch.equal(a, b)
        with ThreadPoolExecutor(4) as pool:  # and callers do not disturb one another
            for got in [job.result() for job in [pool.submit(all_ops) for _ in range(4)]]:
                for a, b in zip(got, want, strict=True):
                    assert torch.equal(a, b)
    finally:
        torch.set_num_threads(had)


def test_a_fork_can_go_on():
    script = """
import os, torch
from d3s_megatron.ops import extension, top_share
torch.set_num_threads(2)
n = 600_000
scores, uid, at = torch.arange(n).float(), torch.zeros(n, dtype=torch.int64), torch.arange(n)
scores = scores * 1  # several threads have run before the fork
want = int(top_share(scores, 0.2, uid, at).sum())
child = os.fork()
if child == 0:
    ext = extension.module()
    mask, out = torch.empty(n, dtype=torch.bool), torch.zeros(3, dtype=torch.int64)
    ext.TopShare(scores, uid, at, 2).split(ext.key_of(-1.0), ext.key_of(1.0), mask, out)
    os._exit(0 if out.tolist() == [n - 2, 2, 0] else 1)
_, status = os.waitpid(child, 0)
assert status == 0 and want == n // 5
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=1200)


# ---- large selections ----


def values_of(kind, n, seed):
    g = torch.Generator().manual_seed(seed)
    normal = torch.randn(n, generator=g, dtype=torch.float64)
    return {
        "normal": normal,
        "two humps": normal + 9 * (torch.rand(n, generator=g) < 0.3),
        "heavy tails": normal / torch.rand(n, generator=g).double().clamp(min=1e-9) ** 3,
        "binary": (normal > 0.4).double() * 2.474874 - 0.353553,
        "lattice": normal.mul(3).round(),
        "spikes": torch.where(normal.abs() < 1.2, 0.0, normal),
        "powers of two": torch.exp2(-torch.arange(n) * (900.0 / n)).double()[torch.randperm(n, generator=g)],
        "far off": normal + 1e9,
        "skewed": normal.exp(),
        "one apart": torch.zeros(n, dtype=torch.float64).index_fill_(0, torch.tensor([n // 2]), 1.0),
    }[kind]


def spread(values, mask):
    x = values[mask] - values.mean()
    return (x * x).sum() - x.sum() ** 2 / len(x)


@pytest.mark.parametrize(
    "kind",
    ["normal", "two humps", "heavy tails", "binary", "lattice", "spikes", "powers of two", "far off", "skewed",
     "one apart"],
)  # fmt: skip
@pytest.mark.parametrize("n", [4096, 20_011])
def test_large_max_variance(kind, n):
    values = values_of(kind, n, n)
    key = torch.randperm(n, generator=torch.Generator().manual_seed(1))
    for m in (1, 2, 7, n // 10, n // 3, n // 2, n - 1 - n // 5, n - 1):
        fast = max_variance_subset(values, m, key)
        with backend("reference"):
            want = max_variance_subset(values, m, key)
        assert int(fast.sum()) == m
        assert spread(values, fast) >= spread(values, want) * (1 - 1e-11)
        if kind != "far off":  # there float64 itself blurs which splits are tied
            assert torch.equal(fast, want), (kind, n, m, int((fast != want).sum()))


@pytest.mark.parametrize("layout", ["random", "sorted", "blocks", "mostly zero", "constant", "huge", "tiny bracket"])
@pytest.mark.parametrize("rho", [1e-6, 0.2, 0.999, 1.0])
def test_large_top_share(layout, rho):
    g = torch.Generator().manual_seed(3)
    n = 400_003
    base = torch.rand(n, generator=g)
    scores = {
        "random": base,
        "sorted": base.sort().values,
        "blocks": base + (torch.arange(n) // 1000 % 7),
        "mostly zero": base * (base > 0.9),
        "constant": torch.full((n,), -2.5),
        "huge": (base - 0.5) * 2 * 3.4e38,
        "tiny bracket": 1 + base * 1e-6,
    }[layout]
    uid = torch.randint(-(1 << 62), 1 << 62, (400,), generator=g)[torch.arange(n) // 1001]
    position = torch.arange(n) % 1001
    fast = top_share(scores, rho, uid, position)
    with backend("reference"):
        assert torch.equal(fast, top_share(scores, rho, uid, position))


def test_broken_scores_are_counted():
    scores, ids = torch.rand(300_000), torch.arange(300_000)
    scores[7], scores[250_000], scores[299_999] = torch.inf, torch.nan, -torch.inf
    with pytest.raises(ValueError, match="1 NaN and 2 infinite values among 300000"):
        top_share(scores, 0.1, ids, ids)


# ---- bad arguments ----


def odd_tensors():
    """Tensors of every kind that a binding must refuse or take, never trust."""
    dtypes = (torch.float32, torch.float64, torch.int64, torch.int32, torch.bool, torch.bfloat16)
    for shape in [(0,), (3,), (8,), (3, 8), (2, 2, 2), ()]:
        yield from (torch.zeros(shape, dtype=dtype) for dtype in dtypes)
    yield torch.zeros(16)[::2]
    yield torch.zeros(8, 3).t()
    yield torch.zeros(1).expand(8)
    yield torch.zeros(8, 1).expand(8, 5)
    yield torch.zeros(8, device="meta")
    yield torch.zeros(8).to_sparse()
    yield torch._neg_view(torch.zeros(8, dtype=torch.float64))
    yield torch.zeros(8, dtype=torch.complex64)
    yield from (None, 3, 2.5, "text", [1, 2], object())


def ok_arguments():
    f, d, i, b = torch.zeros(8), torch.zeros(8, dtype=torch.float64), torch.arange(8), torch.zeros(8, dtype=torch.bool)
    x = torch.zeros(8, 3)
    selector = ext.TopShare(f, i, i, 1)
    out3 = torch.zeros(3, dtype=torch.int64)
    selector.split(ext.key_of(-1.0), ext.key_of(1.0), b, out3)

    def split_and_write(*args):
        writer = ext.TopShare(f, i, i, 1)
        writer.split(ext.key_of(-1.0), ext.key_of(1.0), torch.zeros(8, dtype=torch.bool), out3.clone())
        writer.write(*args)

    bins = torch.zeros(4096, dtype=torch.int64)
    return [
        (ext.max_variance_subset, [d, 2, i, None, b]),
        (ext.balanced_partition, [i, 3, False, i.clone()]),
        (ext.first_fit, [i, 9, i.clone()]),
        (ext.group_advantages, [d, i, b, True, d.clone()]),
        (ext.TopShare, [f, i, i, 1]),
        (ext.row_stats, [x, i - 9, 3, 1.0, torch.zeros(24, dtype=torch.float64), d, 1]),
        (ext.row_backward, [x, x.clone(), i - 9, 3, 1.0, f, f, f, f, None, 1]),
        (selector.sample, [bins[:2048]]),
        (selector.refine, [1, 2, bins]),
        (selector.split, [ext.key_of(-1.0), ext.key_of(1.0), b, out3]),
        (selector.count_broken, [out3[:2]]),
        (selector.ends, [out3[:2]]),
        (selector.counts, [-(2**32), 21, bins]),
        (split_and_write, [ext.key_of(0.0), 0, 0]),
    ]


@pytest.mark.parametrize("seed", range(3))
def test_bindings_refuse_and_never_crash(seed):
    pool, rng = list(odd_tensors()), random.Random(seed)
    for function, good in ok_arguments():
        function(*good)
        for _ in range(150):
            args = list(good)
            for at in rng.sample(range(len(args)), min(len(args), rng.choice([1, 1, 2]))):
                numbers = [-1, 0, 5, 1 << 40, float("nan"), -2.0]
                args[at] = rng.choice(numbers if isinstance(args[at], int | float) else pool)
            try:
                function(*args)
            except (ValueError, TypeError) as error:  # TypeError: a number that is none, refused by pybind11
                assert str(error)


@pytest.mark.parametrize("seed", range(2))
def test_ops_refuse_with_a_value_error(seed):
    """What users call: a number that is none, a tensor of another kind, always ValueError with the value."""
    f, d, i, x = torch.zeros(8), torch.zeros(8, dtype=torch.float64), torch.arange(8), torch.zeros(8, 9)
    calls = [
        (max_variance_subset, [d, 2, i]),
        (group_advantages, [d, i, i == 3]),
        (top_share, [f, 0.5, i, i]),
        (lambda x, y, t, v: logprob_entropy(x, y, temperature=t, vocab_size=v), [x, i, 1.0, 9]),
        (lambda h, w, y, t, n: linear_logprob(h, w, y, temperature=t, tile=n), [x, x, i, 1.0, 4]),
        (first_fit, [[1, 2], 5]),
        (balanced_partition, [[1, 2], 5]),
    ]
    pool, rng = list(odd_tensors()), random.Random(seed)
    for function, good in calls:
        function(*good)
        for _ in range(100):
            args, at = list(good), rng.randrange(len(good))
            args[at] = rng.choice([-1, 1 << 70, float("nan"), -2.5, "3", None] if at != 0 else pool)
            if isinstance(args[at], list) or (function in (first_fit, balanced_partition) and at == 0):
                args[at] = [1, rng.choice([-1, 2.5, "x", None])]
            try:
                function(*args)
            except ValueError as error:
                assert str(error)


class OnGpu:
    """What a binding reads of a tensor on a GPU, without one: a right call gets as far as asking for the stream."""

    layout, device = "torch.strided", "cuda:0"

    def __init__(self, like):
        self.dtype, self.shape, self.stride, self.is_neg, self.data_ptr = (
            like.dtype, like.shape, like.stride, like.is_neg, like.data_ptr,
        )  # fmt: skip


@pytest.mark.skipif(not hasattr(ext, "cuda"), reason="built without CUDA")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here: its kernels would run on made-up pointers")
@pytest.mark.parametrize("seed", range(3))
def test_cuda_bindings_refuse_and_never_crash(seed, monkeypatch):
    def no_stream(*args):
        raise RuntimeError("no CUDA device")

    monkeypatch.setattr(torch.cuda, "current_stream", no_stream)  # the actor, where it came first, gives a stand-in
    f, d, i, b = torch.zeros(8), torch.zeros(8, dtype=torch.float64), torch.arange(8), torch.zeros(8, dtype=torch.bool)
    x, state, counts = torch.zeros(8, 3), torch.zeros(8, dtype=torch.int64), torch.zeros(2050, dtype=torch.int64)
    items, sums = torch.zeros(2 * 8 * 24, dtype=torch.uint8), torch.zeros(36, dtype=torch.float64)
    one, borders = torch.zeros(1, dtype=torch.int32), torch.tensor([0, 8])
    calls = [
        (ext.cuda.row_stats, [x, i, 3, 1.0, torch.zeros(32)]),
        (ext.cuda.row_backward, [x, x, i, 3, 1.0, f, f, f, f, None]),
        (ext.cuda.max_variance, [d, i, i, borders, borders, 2, items, sums, b, one]),
        (ext.cuda.share_histogram, [f, i, i, 0, 21, 11, state, counts]),
        (ext.cuda.share_pick, [0, 21, 11, state, counts]),
        (ext.cuda.share_mask, [f, i, i, state, b]),
    ]
    tensors, rng = list(odd_tensors()), random.Random(seed)
    pool = [OnGpu(t) if isinstance(t, torch.Tensor) and t.layout == torch.strided else t for t in tensors] + tensors
    numbers = [-1, 0, 5, 1 << 40, float("nan"), -2.0]
    for function, good in calls:
        good = [OnGpu(a) if isinstance(a, torch.Tensor) else a for a in good]
        with pytest.raises((AssertionError, RuntimeError)):  # torch has no CUDA device: the arguments were right
            function(*good)
        for _ in range(100):
            args = list(good)
            for at in rng.sample(range(len(args)), rng.choice([1, 1, 2])):
                args[at] = rng.choice(numbers if isinstance(args[at], int | float) else pool)
            with pytest.raises((ValueError, TypeError, AssertionError, RuntimeError)) as error:
                function(*args)
            assert str(error.value)


@given(st.integers(0, 40), st.integers(1, 70), st.integers(0, 70), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_rows_in_a_wider_buffer_stay_inside(num, vocab, valid, threads):
    """Only the rows' own columns are written; guards around them stay."""
    valid = min(valid, vocab)
    buffer = torch.full((num, vocab + 9), 7.0, dtype=torch.bfloat16)
    x = buffer[:, 4 : 4 + vocab]
    one = torch.ones(num)
    ext.row_backward(x, x, torch.full((num,), -1), valid, 1.0, one, one, one, one, one, threads)
    assert (buffer[:, :4] == 7).all() and (buffer[:, 4 + vocab :] == 7).all() and (x[:, valid:] == 0).all()


def test_index_arithmetic_is_64_bit():
    """2^31 rows apart by construction: a row stride that overflows 32 bits, over pages that are never touched."""
    if os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") < 2 << 30:
        pytest.skip("less than 2 GB of memory")
    stride = (1 << 31) + 64
    buffer = torch.empty(stride * 2, dtype=torch.bfloat16)  # 8 GB of addresses, three pages of memory
    rows = buffer.as_strided((2, 64), (stride, 1))
    rows[0], rows[1] = 1.0, torch.arange(64).bfloat16()
    lp, h = logprob_entropy(rows, torch.tensor([3, 63]))
    torch.testing.assert_close(lp, rows.float().log_softmax(-1)[[0, 1], [3, 63]])
