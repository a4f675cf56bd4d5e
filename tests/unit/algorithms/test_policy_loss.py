"""The loss against plain loops in float64, and the faults that people met in such losses."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from d3s_megatron.algorithms.policy_loss import METRICS, PolicyLoss, kl_estimate, sequence_mean

from .builders import loss_batch

TOKEN = PolicyLoss("token", 0.2, 0.2, None, 0.0, "k3")
SEQUENCE = replace(TOKEN, ratio="sequence")


def run(loss, log_probs, batch):
    """(loss, gradient, metrics by name)."""
    x = torch.tensor(log_probs, dtype=batch.weights.dtype, requires_grad=True)
    value, metrics = loss(x, batch)
    (gradient,) = torch.autograd.grad(value, x)
    return value.item(), gradient, dict(zip(METRICS, metrics.tolist(), strict=True))


def slow(loss, log_probs, batch):
    """The same by the formulas of the docstring, one token at a time; the derivative is written out by hand."""
    old, advantages = batch.old_log_probs.tolist(), batch.advantages.tolist()
    sequence, weights = batch.sequence.tolist(), batch.weights.tolist()
    value, gradient, clipped, dual_clipped = 0.0, [], 0, 0
    for t, log_prob in enumerate(log_probs):
        if loss.ratio == "token":
            w = math.exp(log_prob - old[t])
        else:
            mine = [u for u in range(len(old)) if sequence[u] == sequence[t]]
            w = math.exp(sum(log_probs[u] - old[u] for u in mine) / len(mine))
        a = advantages[t]
        if a >= 0:
            inside = w <= 1 + loss.clip_high
            gain = a * (w if inside else 1 + loss.clip_high)
            cut = not inside and a > 0
        else:
            inside = w >= 1 - loss.clip_low
            gain = a * (w if inside else 1 - loss.clip_low)
            cut = not inside
        bounded = loss.dual_clip is not None and a < 0 and gain < loss.dual_clip * a
        if bounded:
            gain = loss.dual_clip * a
        slope = a * w if inside and not bounded else 0.0
        value -= weights[t] * gain
        grad = -weights[t] * slope
        clipped += cut and batch.keep[t].item()
        dual_clipped += bounded and batch.keep[t].item()
        if batch.ref_log_probs is not None:
            d = batch.ref_log_probs[t].item() - log_prob
            kl, kl_slope = {"k1": (-d, 1.0), "k2": (d * d / 2, -d), "k3": (math.exp(d) - d - 1, 1 - math.exp(d))}[
                loss.kl_kind
            ]
            value += loss.kl_beta * batch.kl_weights[t].item() * kl
            grad += loss.kl_beta * batch.kl_weights[t].item() * kl_slope
        gradient.append(grad)
    return value, gradient, clipped, dual_clipped


def random_batch(seed, with_ref=True):
    g = torch.Generator().manual_seed(seed)

    def normal(scale, num=24):
        return (torch.randn(num, generator=g, dtype=torch.float64) * scale).tolist()

    def per_response(scale):
        return torch.tensor(normal(scale, 4), dtype=torch.float64).repeat_interleave(6)

    keep = (torch.rand(24, generator=g) < 0.6).tolist()
    weights = [w * k for w, k in zip(torch.rand(24, generator=g).tolist(), keep, strict=True)]
    batch = loss_batch(
        old=(torch.tensor(normal(0.5), dtype=torch.float64) + per_response(0.7) - 2).tolist(),
        advantages=per_response(1.5).tolist(),
        sequence=[t // 6 for t in range(24)],
        weights=weights,
        keep=keep,
        ref=[x - 2 for x in normal(0.4)] if with_ref else None,
        kl_weights=torch.rand(24, generator=g).tolist(),
    )
    return [x - 2 for x in normal(0.5)], batch


@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("dual_clip", [None, 1.05, 1.5])
@pytest.mark.parametrize(("kl_beta", "kl_kind"), [(0.0, "k3"), (0.3, "k1"), (0.3, "k2"), (0.3, "k3")])
def test_equals_plain_loops(ratio, dual_clip, kl_beta, kl_kind):
    loss = PolicyLoss(ratio, 0.1, 0.25, dual_clip, kl_beta, kl_kind)
    some_clipped = some_dual = 0
    for seed in range(20):
        log_probs, batch = random_batch(seed, with_ref=kl_beta > 0)
        value, gradient, metrics = run(loss, log_probs, batch)
        want, want_gradient, clipped, dual_clipped = slow(loss, log_probs, batch)
        assert value == pytest.approx(want, rel=1e-12)
        assert gradient.tolist() == pytest.approx(want_gradient, rel=1e-12, abs=1e-15)
        assert (metrics["num_clipped"], metrics["num_dual_clipped"]) == (clipped, dual_clipped)
        some_clipped, some_dual = some_clipped + clipped, some_dual + dual_clipped
    assert some_clipped and bool(some_dual) == (dual_clip is not None)


@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("kl_kind", ["k1", "k2", "k3"])
def test_gradcheck(ratio, kl_kind):
    """For the sequence ratio too: with one weight per response its gradient is that of the plain sequence form."""
    log_probs, batch = random_batch(3)
    batch = replace(batch, weights=torch.tensor([0.1, 0.2, 0.3, 0.4]).double()[batch.sequence])
    loss = PolicyLoss(ratio, 0.1, 0.25, 2.0, 0.3, kl_kind)
    x = torch.tensor(log_probs, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: loss(x, batch)[0], x)


@pytest.mark.parametrize(
    ("advantage", "ratio", "value", "slope"),
    [
        (1.0, 1.1, -1.1, -1.1),
        (1.0, 1.3, -1.2, 0.0),  # too far up already
        (1.0, 0.5, -0.5, -0.5),  # not clipped: the way back stays open
        (-1.0, 0.9, 0.9, 0.9),
        (-1.0, 0.5, 0.8, 0.0),  # too far down already
        (-1.0, 1.3, 1.3, 1.3),
        (-1.0, 4.0, 3.0, 0.0),  # dual clip
        (1.0, 4.0, -1.2, 0.0),
        (0.0, 4.0, 0.0, 0.0),
    ],
)
def test_clips_on_both_sides(advantage, ratio, value, slope):
    for loss in (replace(TOKEN, dual_clip=3.0), replace(SEQUENCE, dual_clip=3.0)):
        got, gradient, _ = run(loss, [math.log(ratio) - 1], loss_batch([-1.0], [advantage], [0]))
        assert got == pytest.approx(value)
        assert gradient.item() == pytest.approx(slope)


def test_on_policy_the_gradient_is_plain_policy_gradient():
    batch = loss_batch([-1.0, -2.0, -0.5], [2.0, 2.0, -1.0], [0, 0, 1], weights=[0.25, 0.25, 0.5])
    for loss in (TOKEN, SEQUENCE, replace(TOKEN, clip_low=3e-4, clip_high=4e-4)):
        value, gradient, metrics = run(loss, [-1.0, -2.0, -0.5], batch)
        assert value == -0.5
        assert gradient.tolist() == [-0.5, -0.5, 0.5]
        assert metrics == {
            "num_tokens": 3,
            "num_clipped": 0,
            "num_dual_clipped": 0,
            "kl": 0,
            "policy_kl": 0,
            "ratio": 3,
        }


def test_sequence_ratio_is_the_exponential_of_the_mean():
    log_ratios = [0.2, 0.4, -0.3, 9.0]  # the last token belongs to another response
    batch = loss_batch([-1.0] * 4, [1.0] * 4, [0, 0, 0, 1], keep=[True, True, True, False], weights=[1, 1, 1, 0])
    loss = replace(SEQUENCE, clip_high=1.0)
    value, gradient, metrics = run(loss, [r - 1 for r in log_ratios], batch)
    assert metrics["ratio"] / 3 == pytest.approx(1.105171, abs=1e-6)
    assert value == pytest.approx(-3 * 1.105171, abs=1e-5)
    assert gradient.tolist() == pytest.approx([-1.105171] * 3 + [0], abs=1e-6)
    assert gradient[3] == 0


def test_sequence_ratio_sees_dropped_tokens():
    batch = loss_batch([-1.0] * 2, [1.0] * 2, [0, 0], keep=[True, False], weights=[1, 0])
    loss = replace(SEQUENCE, clip_high=1.0)
    value, gradient, _ = run(loss, [-0.8, -0.6], batch)
    assert value == pytest.approx(-math.exp(0.3))
    assert gradient.tolist() == pytest.approx([-math.exp(0.3), 0])
    assert loss.reads_all_tokens and not TOKEN.reads_all_tokens


def test_token_form_has_value_and_gradient_of_the_sequence_form():
    log_probs, batch = random_batch(11)
    lengths = torch.tensor([6.0] * 4).double()
    share = torch.tensor([0.1, 0.2, 0.3, 0.4]).double()
    batch = replace(batch, weights=(share / lengths)[batch.sequence], ref_log_probs=None)
    value, gradient, _ = run(replace(SEQUENCE, clip_low=0.05, clip_high=0.1), log_probs, batch)

    x = torch.tensor(log_probs, dtype=torch.float64, requires_grad=True)
    s = torch.stack([(x - batch.old_log_probs)[batch.sequence == i].mean().exp() for i in range(4)])
    a = batch.advantages[::6]
    plain = -(share * torch.minimum(s * a, s.clamp(0.95, 1.1) * a)).sum()
    plain.backward()
    assert value == pytest.approx(plain.item())
    assert gradient.tolist() == pytest.approx(x.grad.tolist())
    assert (gradient == 0).any() and (gradient != 0).any()  # some responses are clipped


@pytest.mark.parametrize("loss", [TOKEN, SEQUENCE], ids=["token", "sequence"])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
@pytest.mark.parametrize("log_ratio", [120.0, -120.0, math.inf])
def test_huge_log_ratios_stay_finite(loss, dual_clip, log_ratio):
    for advantage in (0.0, 1.0, -1.0):
        batch = loss_batch([-log_ratio - 1, -1.0], [advantage] * 2, [0, 1], dtype=torch.float32)
        value, gradient, metrics = run(replace(loss, dual_clip=dual_clip), [-1.0, -1.0], batch)
        assert math.isfinite(value) and gradient.isfinite().all()
        assert all(map(math.isfinite, metrics.values()))
        assert gradient[1] == -advantage  # the token beside it is as it was


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("difference", [120.0, -120.0])
def test_huge_differences_to_the_reference_stay_finite(kind, difference):
    batch = loss_batch([-1.0], [0.0], [0], ref=[difference - 1], dtype=torch.float32)
    value, gradient, _ = run(replace(TOKEN, kl_beta=1.0, kl_kind=kind), [-1.0], batch)
    assert math.isfinite(value) and gradient.isfinite().all()
    assert value > 0 or kind == "k1"


@pytest.mark.parametrize("loss", [TOKEN, SEQUENCE], ids=["token", "sequence"])
@pytest.mark.parametrize("where", ["new", "old", "ref"])
def test_nan_stays_visible(loss, where):
    values = {name: math.nan if name == where else -1.0 for name in ("new", "old", "ref")}
    batch = loss_batch([values["old"], -1.0], [1.0, 1.0], [0, 0], ref=[values["ref"], -1.0])
    value, _, _ = run(replace(loss, kl_beta=0.1), [values["new"], -1.0], batch)
    assert math.isnan(value)


def test_kl_values():
    new, ref = torch.tensor([-1.0]), torch.tensor([-1.5])
    assert kl_estimate(new, ref, "k1").item() == pytest.approx(0.5)
    assert kl_estimate(new, ref, "k2").item() == pytest.approx(0.125)
    assert kl_estimate(new, ref, "k3").item() == pytest.approx(math.exp(-0.5) - 0.5, abs=1e-6)
    close = torch.linspace(-1e-3, 1e-3, 101)
    assert (kl_estimate(torch.zeros(101), close, "k3") >= 0).all()


@pytest.mark.parametrize(
    ("kind", "expectation", "slope"), [("k1", 0.082283, 0.0), ("k2", 0.078766, 0.177933), ("k3", 0.082283, 0.2)]
)
def test_gradient_of_kl_estimates_by_exact_expectation(kind, expectation, slope):
    """Policy 0.7 / 0.3, reference 0.5 / 0.5: k2 has the KL's gradient, 0.7 x 0.3 x log(7 / 3); k3 and k1 do not."""
    assert 0.7 * 0.3 * math.log(7 / 3) == pytest.approx(0.177933, abs=1e-6)
    logits = torch.tensor([math.log(0.7), math.log(0.3)], dtype=torch.float64, requires_grad=True)
    log_probs = logits.log_softmax(0)
    batch = loss_batch(log_probs.tolist(), [0.0, 0.0], [0, 1], weights=[0.7, 0.3], ref=[math.log(0.5)] * 2)
    value, _ = replace(TOKEN, kl_beta=1.0, kl_kind=kind)(log_probs, batch)
    value.backward()
    assert value.item() == pytest.approx(expectation, abs=1e-6)
    assert logits.grad[0].item() == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize("loss", [TOKEN, SEQUENCE], ids=["token", "sequence"])
def test_dropped_tokens_have_exactly_no_gradient(loss):
    log_probs, batch = random_batch(5)
    batch = replace(batch, kl_weights=batch.weights)
    _, gradient, metrics = run(replace(loss, kl_beta=0.5, dual_clip=1.5), log_probs, batch)
    assert (gradient[~batch.keep] == 0).all()
    assert (gradient[batch.keep] != 0).any()
    assert metrics["num_tokens"] == batch.keep.sum()


def test_kl_may_cover_dropped_tokens():
    batch = loss_batch([-1.0] * 2, [1.0] * 2, [0, 0], [1, 0], [True, False], ref=[-1.5] * 2, kl_weights=[0.5, 0.5])
    value, gradient, metrics = run(replace(TOKEN, kl_beta=0.1, kl_kind="k2"), [-1.0, -1.0], batch)
    assert value == pytest.approx(-1 + 0.1 * 0.125)
    assert gradient.tolist() == pytest.approx([-1 + 0.1 * 0.25, 0.1 * 0.25])
    assert metrics["kl"] == pytest.approx(0.125)  # metrics are sums over kept tokens


def test_metrics_by_hand():
    ratios, advantages = [1.5, 0.5, 1.0, 4.0, 1.5], [1.0, -1.0, 1.0, -1.0, 1.0]
    batch = loss_batch([-2.0] * 5, advantages, [0] * 5, keep=[True] * 4 + [False], ref=[-2.0] * 5)
    log_probs = [math.log(r) - 2 for r in ratios]
    _, _, metrics = run(replace(TOKEN, dual_clip=3.0), log_probs, batch)
    assert metrics["num_tokens"] == 4
    assert metrics["num_clipped"] == 2
    assert metrics["num_dual_clipped"] == 1
    assert metrics["ratio"] == pytest.approx(7.0)
    assert metrics["policy_kl"] == pytest.approx(sum(r - math.log(r) - 1 for r in ratios[:4]))
    assert metrics["kl"] == pytest.approx(sum(1 / r + math.log(r) - 1 for r in ratios[:4]))


def test_zero_advantages_give_exactly_nothing():
    for loss, ratio in itertools.product((TOKEN, SEQUENCE), (0.1, 1.0, 9.0)):
        value, gradient, _ = run(loss, [math.log(ratio) - 1], loss_batch([-1.0], [0.0], [0]))
        assert value == 0 and gradient.item() == 0


def test_an_empty_micro_batch():
    for loss in (TOKEN, replace(SEQUENCE, dual_clip=2.0)):
        value, gradient, metrics = run(loss, [], loss_batch([], [], []))
        assert value == 0 and gradient.shape == (0,) and set(metrics.values()) == {0.0}


def test_sequence_mean():
    values, sequence = torch.tensor([1.0, 5.0, 2.0, 3.0]), torch.tensor([0, 2, 0, 2])
    assert sequence_mean(values, sequence, 4).tolist() == [1.5, 4.0, 1.5, 4.0]
