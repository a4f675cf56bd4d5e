"""Weights c_i / Z and the loss that is made of them, however the samples are split into micro-batches and ranks."""

import math

import pytest
import torch

from d3s_megatron.actor.packing import empty_row, pack
from d3s_megatron.algorithms.loss_batch import StepTensors
from d3s_megatron.algorithms.normalization import kept_counts, token_weights
from d3s_megatron.algorithms.policy_loss import METRICS, PolicyLoss

from .builders import alone, in_ranks, sample, scores

KINDS = ("token_mean", "seq_mean_selected", "seq_mean_full", "dr_grpo")


def masks(*rows):
    return [torch.tensor([c == "x" for c in row]) for row in rows]


def weights_of(kind, keep, max_length, reduce=alone):
    return token_weights(kind, keep, max_length, reduce(kept_counts(keep), "sum"))


@pytest.mark.parametrize(
    ("kind", "want"),
    [
        ("token_mean", [[1 / 3, 0, 1 / 3, 0], [1 / 3, 0], [0]]),
        ("seq_mean_selected", [[1 / 4, 0, 1 / 4, 0], [1 / 2, 0], [0]]),
        ("seq_mean_full", [[1 / 12, 0, 1 / 12, 0], [1 / 6, 0], [0]]),
        ("dr_grpo", [[1 / 30, 0, 1 / 30, 0], [1 / 30, 0], [0]]),
    ],
)
def test_by_hand(kind, want):
    got = weights_of(kind, masks("x.x.", "x.", "."), 10)
    for weights, row in zip(got, want, strict=True):
        assert weights.tolist() == pytest.approx(row)
        assert weights.dtype == torch.float32


def weighted(kind, keep, values, reduce=alone, max_length=10):
    return sum(float((w * v).sum()) for w, v in zip(weights_of(kind, keep, max_length, reduce), values, strict=True))


def test_dropped_tokens_leave_numerator_and_denominator():
    assert weighted("token_mean", masks("xxxxxx...."), [torch.ones(10)]) == pytest.approx(1.0)


@pytest.mark.parametrize(("first", "second", "want"), [(1.0, 4.0, 1.5), (0.5, 2.0, 0.75)])
def test_every_rank_divides_by_the_tokens_of_all(first, second, want):
    """Ten tokens here and two there: the mean over tokens, not the mean of the two ranks' means."""
    parts = [(masks("x" * 10), [torch.full((10,), first)]), (masks("xx"), [torch.full((2,), second)])]
    assert sum(in_ranks(parts, lambda part, reduce: weighted("token_mean", *part, reduce))) == pytest.approx(want)


def test_responses_weigh_the_same_in_a_sequence_mean():
    for kind in ("seq_mean_selected", "seq_mean_full"):
        long, short = weights_of(kind, masks("x" * 10, "xx"), 10)
        assert long.sum().item() == pytest.approx(short.sum().item()) == pytest.approx(0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_kept_gives_zero_weights(kind):
    assert list(weights_of(kind, [], 10)) == []
    assert weights_of(kind, masks("..."), 10)[0].tolist() == [0.0] * 3


LENGTHS = (5, 1, 7, 3, 2, 6)
ADVANTAGES = (1.3, -0.7, 0.4, -1.1, 0.0, 2.0)


def step_samples(seed=0):
    g = torch.Generator().manual_seed(seed)
    draw = lambda n: (torch.randn(n, generator=g) * 0.3 - 1).tolist()  # noqa: E731
    samples = [sample(i, n, a) for i, (n, a) in enumerate(zip(LENGTHS, ADVANTAGES, strict=True))]
    rows = [scores(draw(n), old=draw(n), ref=draw(n)) for n in LENGTHS]
    keep = [torch.rand(n, generator=g) < 0.6 for n in LENGTHS]
    new = [torch.tensor(draw(n)) for n in LENGTHS]
    return samples, rows, keep, new


def loss_and_gradients(part, loss, kind, kl_all, max_tokens, reduce=alone, num_empty=0):
    """What one rank sums over its micro-batches: ([loss, metrics], gradient per token of each of its samples)."""
    samples, rows, keep, new = ([items[i] for i in part] for items in step_samples())
    new = [x.clone().requires_grad_() for x in new]
    everything = [torch.ones_like(mask) for mask in keep]
    weights = weights_of(kind, keep, 8, reduce)
    kl_weights = weights_of(kind, everything, 8, reduce) if kl_all else weights
    scored = everything if kl_all or loss.reads_all_tokens else keep
    tensors = StepTensors(samples, rows, keep, scored, weights, kl_weights)
    total = torch.zeros(1 + len(METRICS))
    for row in pack(samples, max_tokens, 1, scored) + [empty_row()] * num_empty:
        batch = tensors.loss_batch(row)
        log_probs = torch.cat([torch.zeros(0, requires_grad=True), *(new[i][scored[i]] for i in row.samples)])
        value, metrics = loss(log_probs, batch)
        value.backward()
        total += torch.cat([value.detach()[None], metrics])
    return total, [torch.zeros_like(x) if x.grad is None else x.grad for x in new]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("kl_all", [False, True])
def test_the_split_does_not_matter(kind, ratio, kl_all):
    loss = PolicyLoss(ratio, 0.1, 0.1, 3.0, 0.2, "k3")
    want, want_gradients = loss_and_gradients(range(6), loss, kind, kl_all, max_tokens=1000)
    assert math.isfinite(want[0]) and want[0] != 0
    for ranks in ([[0, 1, 2, 3, 4, 5]], [[3, 0], [5, 4, 2, 1]], [[1], [], [0, 2, 3], [4, 5]]):
        for max_tokens in (4, 12):  # one sample a row; two or three
            results = in_ranks(
                ranks,
                lambda part, reduce, max_tokens=max_tokens: loss_and_gradients(
                    part, loss, kind, kl_all, max_tokens, reduce, num_empty=2
                ),
            )
            total = sum(result[0] for result in results)
            assert total.tolist() == pytest.approx(want.tolist(), rel=1e-5, abs=1e-6)
            for part, (_, gradients) in zip(ranks, results, strict=True):
                for i, gradient in zip(part, gradients, strict=True):
                    assert gradient.tolist() == pytest.approx(want_gradients[i].tolist(), rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("kl_all", [False, True])
def test_dropped_tokens_have_no_gradient_unless_the_kl_covers_them(kl_all):
    _, _, keep, _ = step_samples()
    for ratio in ("token", "sequence"):
        loss = PolicyLoss(ratio, 0.1, 0.1, None, 0.2, "k2")
        _, gradients = loss_and_gradients(range(6), loss, "token_mean", kl_all, 12)
        dropped = torch.cat([gradient[~mask] for gradient, mask in zip(gradients, keep, strict=True)])
        assert len(dropped) > 3 and bool((dropped != 0).all() if kl_all else (dropped == 0).all())


def test_lays_values_out_along_the_scored_rows():
    samples = [sample(4, 2, 0.5), sample(9, 3, -2.0), sample(11, 1, 1.0)]
    rows = [scores([0.0] * n, old=[10.0 * i + t for t in range(n)]) for i, n in enumerate((2, 3, 1))]
    keep = masks("x.", "..x", ".")
    tensors = StepTensors(samples, rows, keep, keep, [m * 0.5 for m in keep], [m * 0.25 for m in keep])
    (row,) = pack(samples, 100, 1, keep)
    batch = tensors.loss_batch(row)
    assert row.samples == (0, 1) and batch.num_sequences == 2  # the third has nothing to score
    assert batch.old_log_probs.tolist() == [0, 12]
    assert batch.advantages.tolist() == [0.5, -2.0]
    assert batch.sequence.tolist() == [0, 1]
    assert batch.keep.tolist() == [True, True]
    assert batch.weights.tolist() == [0.5, 0.5] and batch.kl_weights.tolist() == [0.25, 0.25]
    assert batch.rollout_log_probs.tolist() == [-1.0, -1.0] and batch.ref_log_probs is None

    everything = masks("xx", "xxx", "x")
    batch = StepTensors(samples, rows, keep, everything, keep, keep).loss_batch(pack(samples, 100)[0])
    assert batch.keep.tolist() == [True, False, False, False, True, False]
    assert batch.sequence.tolist() == [0, 0, 1, 1, 1, 2] and batch.num_sequences == 3
