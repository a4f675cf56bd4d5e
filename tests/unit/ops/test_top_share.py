import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from d3s_megatron.ops import backend, extension, num_top, top_share, top_share_cut
from d3s_megatron.ops.top_share import reference_cut

BACKENDS = ["reference"] + (["extension"] if extension.why_missing() is None else [])


@pytest.fixture(params=BACKENDS, autouse=True)
def each_backend(request):
    with backend(request.param):
        yield


def oracle(scores, rho, uid, position):
    """A stable sort by (score descending, uid, position) in Python."""
    rows = sorted(range(len(scores)), key=lambda i: (-float(scores[i]), int(uid[i]), int(position[i])))
    mask = torch.zeros(len(scores), dtype=torch.bool)
    mask[rows[: num_top(rho, len(scores))]] = True
    return mask


def select(values, rho, uid=None, position=None):
    scores = torch.tensor(values, dtype=torch.float32)
    uid = torch.zeros(len(values), dtype=torch.int64) if uid is None else torch.tensor(uid, dtype=torch.int64)
    position = torch.arange(len(values)) if position is None else torch.tensor(position, dtype=torch.int64)
    return top_share(scores, rho, uid, position), oracle(scores, rho, uid, position)


def test_count_is_exact():
    assert [num_top(0.2, n) for n in (0, 1, 4, 5, 6, 10, 11)] == [0, 1, 1, 1, 2, 2, 3]
    assert num_top(0.1, 30) == 3  # 0.1 * 30 is 3.0000000000000004 in float64
    assert num_top(1.0, 7) == 7 and num_top(0.0, 7) == 1
    assert num_top(0.5, 1 << 40) == 1 << 39


floats = st.one_of(
    st.sampled_from([0.0, -0.0, 1e-45, -1e-45, 1e-38, 3.4e38, -3.4e38, 1.0, 1.0000001]),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.integers(-2, 2).map(float),
)


@given(
    st.lists(st.tuples(floats, st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-2, 2)), max_size=60),
    st.floats(0, 1),
)
@example([(0.0, (1 << 63) - 1)] * 2, 0.0)  # the largest uid, whose ties are not all kept
def test_equals_a_stable_sort(rows, rho):
    got, want = select([r[0] for r in rows], rho, [r[1] for r in rows])
    assert torch.equal(got, want)


@pytest.mark.parametrize("n", [1, 31, 32, 33, 1000, 70_001])
@pytest.mark.parametrize("zeros", [0.0, 0.5, 1.0])
def test_many_zero_scores(n, zeros):
    g = torch.Generator().manual_seed(n)
    scores = torch.rand(n, generator=g) * (torch.rand(n, generator=g) >= zeros)
    uid = torch.randint(-(1 << 62), 1 << 62, (max(1, n // 7),), generator=g)[torch.arange(n) * max(1, n // 7) // n]
    position = torch.randperm(n, generator=g)
    for rho in (0.001, 0.2, 0.7, 1.0):
        mask = top_share(scores, rho, uid, position)
        order = np.lexsort((position.numpy(), uid.numpy(), -scores.numpy()))
        want = torch.zeros(n, dtype=torch.bool)
        want[order[: num_top(rho, n)].copy()] = True
        assert torch.equal(mask, want)


def in_ranks(cuts, scores, rho, uid, position, ranks_known=False):
    """Masks of the parts of one batch, each rank a thread that meets the others in every reduction.

    `ranks_known` tells each which rank it is, so that a small batch is gathered.
    """
    from concurrent.futures import ThreadPoolExecutor
    from contextvars import copy_context
    from threading import Barrier, Lock

    parts = list(zip(cuts[:-1], cuts[1:], strict=True))
    barrier, lock, board = Barrier(len(parts)), Lock(), {}

    def rank(r, a, b):
        moved = 0

        def reduce(tensor, how):
            nonlocal moved
            moved += tensor.numel() * tensor.element_size()
            with lock:
                board[r] = tensor.clone()
            barrier.wait(1200)
            everyone = torch.stack([board[i] for i in range(len(parts))])
            tensor.copy_({"sum": everyone.sum, "max": everyone.amax, "min": everyone.amin}[how](0))
            barrier.wait(1200)
            return tensor

        if ranks_known:
            reduce.rank, reduce.num_ranks = r, len(parts)
        mask = top_share(scores[a:b], rho, uid[a:b], position[a:b], reduce)
        cut = top_share_cut(scores[a:b], rho, uid[a:b], position[a:b], reduce)
        assert cut == reference_cut(scores, rho, uid, position, lambda tensor, how: tensor)
        return mask, moved

    with ThreadPoolExecutor(len(parts)) as pool:
        jobs = [pool.submit(copy_context().run, rank, r, a, b) for r, (a, b) in enumerate(parts)]
        done = [j.result() for j in jobs]
    return torch.cat([m for m, _ in done]), max(b for _, b in done)


@given(
    st.lists(st.integers(-1, 3), min_size=1, max_size=40),
    st.floats(0, 1),
    st.lists(st.integers(0, 40), max_size=4),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_ranks_do_not_matter(values, rho, cuts, ranks_known):
    scores = torch.tensor(values, dtype=torch.float32).where(torch.tensor(values) != 3, -0.0)
    uid, position = torch.arange(len(values)) % 3 - 1, torch.arange(len(values))
    cuts = [0, *sorted(min(c, len(values)) for c in cuts), len(values)]
    mask, _ = in_ranks(cuts, scores, rho, uid, position, ranks_known)
    assert torch.equal(mask, oracle(scores, rho, uid, position))


def test_traffic_is_small():
    g = torch.Generator().manual_seed(0)
    n = 300_000
    scores = torch.rand(n, generator=g) * (torch.rand(n, generator=g) > 0.9)
    uid = torch.randint(-(1 << 62), 1 << 62, (1000,), generator=g)[torch.arange(n) // 300]
    mask, moved = in_ranks([0, 100_000, 100_000, n], scores, 0.3, uid, torch.arange(n))
    assert mask.sum() == 90_000
    assert moved <= 2 * 192 * 1024  # of a mask and a cut


def test_cut_makes_the_mask():
    scores = torch.tensor([0.5, 0.0, 0.0, 2.0, -0.0])
    uid, position = torch.tensor([4, 9, 1, 3, 1]), torch.tensor([0, 0, 5, 0, 2])
    cut = top_share_cut(scores, 0.6, uid, position)
    assert (cut.threshold, cut.tie_uid, cut.tie_position, cut.num_kept, cut.num_scores) == (0.0, 1, 2, 3, 5)
    assert cut.mask(scores, uid, position).tolist() == [True, False, False, True, True]


def test_empty():
    none = torch.zeros(0)
    ids = torch.zeros(0, dtype=torch.int64)
    assert top_share(none, 0.5, ids, ids).tolist() == []
    cut = top_share_cut(none, 0.5, ids, ids)
    assert cut.num_kept == 0 and cut.threshold == math.inf


def test_refusals():
    ids = torch.arange(3)
    with pytest.raises(ValueError, match="1 NaN and 1 infinite values among 3"):
        top_share(torch.tensor([math.nan, 1, math.inf]), 0.5, ids, ids)
    with pytest.raises(ValueError, match="rho=1.5"):
        top_share(torch.ones(3), 1.5, ids, ids)
    with pytest.raises(ValueError, match="rho=nan"):
        top_share(torch.ones(3), math.nan, ids, ids)
    with pytest.raises(ValueError, match="float64"):
        top_share(torch.ones(3).double(), 0.5, ids, ids)
    with pytest.raises(ValueError, match="2 entries where 3"):
        top_share(torch.ones(3), 0.5, ids[:2], ids)
