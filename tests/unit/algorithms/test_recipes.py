import itertools
from dataclasses import replace

import pytest
import torch

from d3s_megatron.actor.packing import pack
from d3s_megatron.algorithms.advantages import GroupAdvantages
from d3s_megatron.algorithms.config import AlgorithmConfig
from d3s_megatron.algorithms.loss_batch import StepTensors
from d3s_megatron.algorithms.normalization import kept_counts, token_weights
from d3s_megatron.algorithms.policy_loss import PolicyLoss
from d3s_megatron.algorithms.recipes import RECIPES, Recipe, amounts, make_loss, make_recipe
from d3s_megatron.algorithms.sample_selection import DropZero, MaxVariance, RandomSamples
from d3s_megatron.algorithms.token_selection import AllTokens, TopShare

from .builders import NAN, alone, experience, kept_uids, sample, scores, success

ADVANTAGES = GroupAdvantages()
PER_GROUP, WHOLE_BATCH = MaxVariance("advantage", "group"), MaxVariance("advantage", "batch")
BY_REWARD = MaxVariance("reward", "group")


def config(name="d3s", **changes):
    return AlgorithmConfig(
        name=name, **({"samples_per_prompt": 8, "kept_per_prompt_init": 2, "kept_per_prompt_final": 8} | changes)
    )


@pytest.mark.parametrize(
    ("name", "credit", "tokens", "ratio", "schedule"),
    [
        ("grpo", (ADVANTAGES,), AllTokens(), "token", "constant"),
        ("gspo", (ADVANTAGES,), AllTokens(), "sequence", "constant"),
        ("pods", (BY_REWARD, ADVANTAGES), AllTokens(), "token", "constant"),
        ("d1s", (ADVANTAGES, PER_GROUP), AllTokens(), "token", "constant"),
        ("d1s-c", (ADVANTAGES, WHOLE_BATCH), AllTokens(), "token", "constant"),
        ("d2s", (ADVANTAGES, WHOLE_BATCH), TopShare(), "token", "constant"),
        ("d3s", (ADVANTAGES, WHOLE_BATCH), TopShare(), "token", "linear"),
        ("d3s-i", (ADVANTAGES, PER_GROUP), TopShare(), "token", "linear"),
        ("gspo+d3s", (ADVANTAGES, WHOLE_BATCH), TopShare(), "sequence", "linear"),
        ("gspo+pods", (BY_REWARD, ADVANTAGES), AllTokens(), "sequence", "constant"),
        ("gspo+grpo", (ADVANTAGES,), AllTokens(), "sequence", "constant"),
        ("grpo+d3s", (ADVANTAGES, WHOLE_BATCH), TopShare(), "token", "linear"),
        ("random", (ADVANTAGES, RandomSamples()), TopShare("chance"), "token", "linear"),
        ("entropy_8020", (ADVANTAGES,), TopShare("entropy", 0.2), "token", "constant"),
    ],
)
def test_compositions(name, credit, tokens, ratio, schedule):
    assert make_recipe(config(name)) == Recipe(name, credit, tokens, ratio, schedule)


def test_every_recipe_takes_either_ratio():
    for name, ratio in itertools.product(RECIPES, ("grpo", "gspo")):
        mixed, plain = make_recipe(config(f"{ratio}+{name}")), make_recipe(config(name))
        assert mixed.ratio == RECIPES[ratio][2]
        assert (mixed.credit, mixed.tokens, mixed.schedule) == (plain.credit, plain.tokens, plain.schedule)


@pytest.mark.parametrize("name", ["ppo", "", "+d3s", "gspo+", "gspo+gspo+d3s", "d3s+gspo", "D3S", "pods+d3s"])
def test_unknown_names_are_refused_with_the_known_ones(name):
    with pytest.raises(ValueError, match=r"algorithm\.name is .*grpo, gspo, pods.*gspo\+NAME"):
        make_recipe(config(name))


@pytest.mark.parametrize(
    ("credit", "message"),
    [
        ((WHOLE_BATCH, ADVANTAGES), "needs advantages, which no step before it gives; put group_advantages before"),
        ((PER_GROUP,), "needs advantages"),
        ((DropZero(), ADVANTAGES), "needs advantages"),
        ((ADVANTAGES, WHOLE_BATCH, ADVANTAGES), "normalised twice"),
        ((BY_REWARD,), "no step gives advantages"),
        ((), "no step gives advantages"),
    ],
)
def test_orders_that_make_no_sense_are_refused(credit, message):
    with pytest.raises(ValueError, match=message):
        Recipe("mine", credit, AllTokens(), "token", "constant")


def test_switches_reach_the_parts():
    recipe = make_recipe(config("d3s", normalize_std=False, drop_zero=True, schedule="constant"))
    assert recipe.credit == (GroupAdvantages(normalize_std=False), WHOLE_BATCH, DropZero())
    assert recipe.schedule == "constant"
    assert make_recipe(config("d1s", schedule="linear")).schedule == "linear"
    assert make_recipe(config("pods", drop_zero=True)).credit == (BY_REWARD, ADVANTAGES, DropZero())


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_survives_a_batch_without_signal(name):
    for groups in ([success(8), success(0)], [[NAN] * 8, success(8)], [[NAN] * 8] * 2):
        for drop_zero in (False, True):
            batch = make_recipe(config(name, drop_zero=drop_zero)).apply(experience(groups), 2)
            assert batch.advantages.tolist() == [0.0] * 16
            assert not (batch.kept & batch.rewards.isnan()).any()
            assert not (drop_zero and batch.kept.any())


def test_drop_zero_leaves_the_groups_that_teach():
    batch = make_recipe(config("grpo", drop_zero=True)).apply(experience([success(8), success(3), success(0)]), 2)
    assert kept_uids(batch) == list(range(8, 16))


def test_pods_normalises_what_it_keeps_and_d1s_does_not():
    batch = experience([success(1), success(6)])
    pods, d1s = (make_recipe(config(name)).apply(batch, 4) for name in ("pods", "d1s"))
    assert kept_uids(pods) == kept_uids(d1s)
    assert pods.advantages[pods.kept].tolist() == pytest.approx(
        [1.5, -0.5, -0.5, -0.5] + [0.866025] * 2 + [-0.866025] * 2, abs=1e-6
    )
    assert d1s.advantages.tolist() == pytest.approx(
        [2.474874] + [-0.353553] * 7 + [0.540062] * 6 + [-1.620185] * 2, abs=1e-6
    )
    assert (pods.advantages[~pods.kept] == 0).all()


def test_advantages_of_all_are_those_before_selection():
    batch = experience([success(1), success(6)])
    plain = make_recipe(config("grpo")).apply(batch, 0).advantages
    for name in RECIPES:
        assert torch.equal(make_recipe(config(name)).advantages_of_all(batch), plain)


def test_amounts_follow_the_recipe():
    def at(name, step, **changes):
        got = amounts(config(name, token_share_init=0.1, token_share_final=0.4, **changes), step, 11)
        return got.num_kept, round(got.token_share, 9)

    assert [at("d3s", step) for step in (0, 5, 10)] == [(2, 0.1), (5, 0.25), (8, 0.4)]
    assert [at("d2s", step) for step in (0, 10)] == [(2, 0.1)] * 2
    assert [at("d1s", step) for step in (0, 10)] == [(2, 1.0)] * 2  # every token of what it keeps
    assert [at("grpo", step) for step in (0, 10)] == [(8, 1.0)] * 2  # everything
    assert at("d1s-c", 10, schedule="linear") == (8, 1.0)
    assert [at("d3s", step, schedule="step", schedule_stages=2) for step in (0, 4, 5, 10)] == [(2, 0.1)] * 2 + [
        (8, 0.4)
    ] * 2
    third = {"stage": 1, "mean": 0.5, "mark": 0.5, "steps": 0}
    got = amounts(config("d3s", schedule="reward"), 0, 11, third)
    assert (got.num_kept, got.token_share) == (4, pytest.approx(0.2))
    assert [at("random", step) for step in (0, 5, 10)] == [at("d3s", step) for step in (0, 5, 10)]
    assert [at("entropy_8020", step, schedule="linear") for step in (0, 10)] == [(8, 0.2)] * 2


def test_resume_gives_the_same_choice():
    """Everything that a step chooses comes from (seed, step) and the batch, so there is no state to lose."""
    for step in (0, 7):
        rows = experience([success(4), success(4), success(2)], seed=3, step=step)
        again = experience([success(4), success(4), success(2)], seed=3, step=step)
        recipe, other = make_recipe(config()), make_recipe(config())
        assert kept_uids(recipe.apply(rows, 2)) == kept_uids(other.apply(again, 2))


def test_loss_defaults_follow_the_ratio():
    assert make_loss(config("d3s")) == PolicyLoss("token", 0.2, 0.2, None, 1e-3, "k3")
    assert make_loss(config("gspo+d3s")) == PolicyLoss("sequence", 3e-4, 4e-4, None, 0.0, "k3")
    given = config("gspo", clip_low=0.1, clip_high=0.0, kl_beta=0.0, dual_clip=3.0, kl_kind="k2")
    assert make_loss(given) == PolicyLoss("sequence", 0.1, 0.0, 3.0, 0.0, "k2")


def one_step(name, normalization):
    """The loss and the gradients of one whole credit-to-loss chain on fixed answers, N = G and rho = 1."""
    settings = config(name, kept_per_prompt_init=8, token_share_init=1.0, token_share_final=1.0, kl_beta=0.01)
    g = torch.Generator().manual_seed(0)
    batch = make_recipe(settings).apply(
        experience([success(3), success(8), success(1)]), amounts(settings, 1, 5).num_kept
    )
    lengths = torch.randint(1, 9, (24,), generator=g).tolist()
    new, old, ref, entropy = (torch.randn(24, 8, generator=g).mul(0.1) - 1 for _ in range(4))
    kept = kept_uids(batch)
    samples = [sample(uid, lengths[uid], batch.advantages[uid].item()) for uid in kept]
    rows = [scores(*(values[uid, : lengths[uid]].tolist() for values in (entropy.abs(), old, ref))) for uid in kept]
    keep = make_recipe(settings).tokens(samples, rows, amounts(settings, 1, 5).token_share, 0, 1, alone)
    weights = token_weights(normalization, keep, 8, kept_counts(keep))
    tensors = StepTensors(samples, rows, keep, keep, weights, weights)
    log_probs = [new[uid, : lengths[uid]].clone().requires_grad_() for uid in kept]
    total = []
    for row in pack(samples, 40, 1, keep):
        value, metrics = make_loss(replace(settings, name="grpo"))(
            torch.cat([log_probs[i] for i in row.samples]), tensors.loss_batch(row)
        )
        value.backward()
        total += [value.item(), *metrics.tolist()]
    return total, [x.grad.tolist() for x in log_probs]


@pytest.mark.parametrize("normalization", ["token_mean", "seq_mean_full", "seq_mean_selected", "dr_grpo"])
def test_keeping_everything_is_plain_grpo_bit_for_bit(normalization):
    plain = one_step("grpo", normalization)
    for name in ("d1s", "d1s-c", "d2s", "d3s", "d3s-i", "pods", "random"):
        assert one_step(name, normalization) == plain


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples_per_prompt": 1}, r"samples_per_prompt is 1: .*at least 2"),
        ({"kept_per_prompt_init": 1}, r"kept_per_prompt_init is 1: give 2 to samples_per_prompt \(8\)"),
        ({"kept_per_prompt_final": 9}, r"kept_per_prompt_final is 9: give 2 to samples_per_prompt \(8\)"),
        ({"name": "d1s", "kept_per_prompt_init": 9}, r"kept_per_prompt_init is 9"),
        ({"token_share_init": 0.0}, r"token_share_init is 0.0: give a share above 0 and at most 1"),
        ({"token_share_final": 1.5}, r"token_share_final is 1.5"),
        ({"token_share_init": NAN}, r"token_share_init is nan"),
        ({"clip_low": -0.1}, r"clip_low is -0.1: it must not be negative"),
        ({"clip_low": 1.0}, r"clip_low is 1.0: .*less than 1"),
        ({"clip_high": -1.0}, r"clip_high is -1.0"),
        ({"kl_beta": -1.0}, r"kl_beta is -1.0"),
        ({"dual_clip": 1.0}, r"dual_clip is 1.0: give more than 1"),
        ({"num_minibatches": 0}, r"num_minibatches is 0"),
        ({"num_epochs": 0}, r"num_epochs is 0"),
        ({"schedule_stages": 1}, r"schedule_stages is 1: give at least 2"),
        ({"schedule_window": 0}, r"schedule_window is 0"),
    ],
)
def test_refusals(changes, message):
    with pytest.raises(ValueError, match=r"algorithm\." + message):
        make_recipe(config(**changes))


def test_only_what_a_recipe_reads_is_refused():
    make_recipe(AlgorithmConfig(name="grpo", samples_per_prompt=4))  # has no N
    make_recipe(AlgorithmConfig(name="d1s", samples_per_prompt=8))  # never reaches a last N
    make_recipe(AlgorithmConfig())
