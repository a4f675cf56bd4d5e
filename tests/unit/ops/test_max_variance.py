import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from d3s_megatron.ops import backend, extension, max_variance_subset

BACKENDS = ["reference"] + (["extension"] if extension.why_missing() is None else [])


@pytest.fixture(params=BACKENDS, autouse=True)
def each_backend(request):
    with backend(request.param):
        yield


def picks(values, m, segments=None):
    values = torch.as_tensor(values, dtype=torch.float64)
    mask = max_variance_subset(values, m, torch.arange(len(values)), segments)
    return mask.nonzero()[:, 0].tolist()


def group(num_right, size=8, right_first=True):
    r = torch.zeros(size, dtype=torch.float64)
    r[:num_right] = 1
    r = r if right_first else r.flip(0)
    return torch.zeros(size, dtype=torch.float64) if num_right in (0, size) else (r - r.mean()) / r.std()


@pytest.mark.parametrize(
    ("m", "kept", "variance"),
    [
        (2, [0, 7], 1.866667),
        (3, [0, 1, 7], 1.244444),
        (4, [0, 1, 6, 7], 1.244444),
        (5, [0, 1, 2, 6, 7], 1.12),
        (8, [0, 1, 2, 3, 4, 5, 6, 7], 1.0),
    ],
)
def test_golden_within_a_group(m, kept, variance):
    a = group(3)
    assert picks(a, m) == kept
    assert a[kept].var().item() == pytest.approx(variance, abs=1e-6)


@pytest.mark.parametrize(
    ("m", "kept", "variance"),
    [
        (2, [0, 31], 12.25),
        (4, [0, 8, 15, 31], 4.666667),
        (6, [0, 8, 9, 14, 15, 31], 3.15),
        (8, [0, 8, 9, 10, 13, 14, 15, 31], 2.5),
        (24, [*range(16), *range(24, 32)], 0.913043),
        (32, list(range(32)), 0.677419),
    ],
)
def test_golden_across_groups(m, kept, variance):
    a = torch.cat([group(1), group(4), group(8), group(7)])
    assert picks(a, m) == kept
    assert a[kept].var().item() == pytest.approx(variance, abs=1e-6)


def brute(values, m):
    """The rule of method 1.6 by exact rational arithmetic over every split."""
    from fractions import Fraction

    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    best = None
    for k in range(m + 1):
        ids = order[:k] + order[len(order) - (m - k) :]
        x = [Fraction(values[i]) for i in ids]
        spread = sum(v * v for v in x) - sum(x) ** 2 / max(m, 1)
        rank = (spread, -abs(2 * k - m), k)
        if best is None or rank > best[0]:
            best = (rank, sorted(ids))
    return best[1]


small = st.lists(st.integers(-4, 4).map(float), min_size=1, max_size=9)


@given(small, st.integers(0, 9))
def test_is_the_argmax_over_all_subsets(values, m):
    m = min(m, len(values))
    got = picks(values, m)
    assert got == brute(values, m)
    if m >= 2:
        var = lambda ids: torch.tensor([values[i] for i in ids]).double().var().item()  # noqa: E731
        best = max(var(c) for c in itertools.combinations(range(len(values)), m))
        assert var(got) == pytest.approx(best, abs=1e-9)


@given(small, st.integers(0, 9), st.permutations(range(9)))
@settings(max_examples=50)
def test_order_does_not_matter(values, m, perm):
    perm = torch.tensor([p for p in perm if p < len(values)])
    x, key = torch.tensor(values, dtype=torch.float64), torch.arange(len(values)) * 7 - 20
    assert torch.equal(max_variance_subset(x, m, key)[perm], max_variance_subset(x[perm], m, key[perm]))


def test_ties_go_by_key():
    key = torch.tensor([5, 1, 4, 2, 3])
    mask = max_variance_subset(torch.tensor([1.0, 1, 0, 0, 0]).double(), 2, key)
    assert mask.tolist() == [False, True, True, False, False]  # first 1 by key, last 0 by key
    equal = max_variance_subset(torch.full((5,), 0.1).double(), 3, key)
    assert equal.tolist() == [True, True, False, True, False]  # keys 1, 2 from the top, 5 from the bottom


@pytest.mark.parametrize(("m", "num"), [(0, 0), (1, 1), (6, 6), (9, 6)])
def test_sizes(m, num):
    assert len(picks([3.0, 1, -2, 5, -0.0, 0.0], m)) == num
    assert picks([], m) == []


@pytest.mark.parametrize("unit", [1e-320, 1e-200, 1.0, 1e200, 1.5e308])
@pytest.mark.parametrize("n", [9, 5000])
def test_units_do_not_matter(unit, n):
    base = torch.arange(n, dtype=torch.float64).remainder(5) / 4  # 0 to 1 in quarters: exact in every unit
    base[3] = -1
    key, m = torch.arange(n), n // 3
    assert torch.equal(max_variance_subset(base * unit, m, key), max_variance_subset(base, m, key))


def test_one_value_is_the_highest():
    assert picks([1e-320, 3.0, -7.0, 0.0], 1) == [1]


def test_segments_are_independent():
    g = torch.Generator().manual_seed(0)
    values = torch.randn(60, generator=g, dtype=torch.float64).mul(2).round()
    segments = torch.randint(-3, 4, (60,), generator=g) * 1_000_000_007
    key = torch.randperm(60, generator=g)
    mask = max_variance_subset(values, 5, key, segments)
    for s in segments.unique():
        rows = segments == s
        assert torch.equal(mask[rows], max_variance_subset(values[rows], 5, key[rows]))


def test_refusals():
    one = torch.ones(3, dtype=torch.float64)
    key = torch.arange(3)
    for bad in (float("nan"), float("inf"), -float("inf")):
        with pytest.raises(ValueError, match=r"values\[1\]=-?(nan|inf)"):
            max_variance_subset(torch.tensor([0, bad, 1], dtype=torch.float64), 2, key)
    with pytest.raises(ValueError, match="m=-1"):
        max_variance_subset(one, -1, key)
    with pytest.raises(ValueError, match="float32"):
        max_variance_subset(one.float(), 1, key)
    with pytest.raises(ValueError, match="2 entries"):
        max_variance_subset(one, 1, key[:2])
