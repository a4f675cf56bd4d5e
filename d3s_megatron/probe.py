"""Looks at a whole rollout batch, kept or not, beside the training step: nothing here changes the run.

What a step logs of entropy and KL is of the rollouts it keeps, so two algorithms' numbers are of different answers.
A probe scores every rollout, and measures what the method's propositions speak of (method 1.3 to 1.5):

    whole   g   = 1/n    sum_i in batch  A_i x m_i      m_i = mean over the response of grad log pi(y_t)
    kept    g'  = 1/n'   sum_i in kept   A_i x m_i      with the advantages of the whole batch
    gamma       = max_i norm(m_i) / 2, over `responses` of them: the smallest for which the propositions' steps hold
    bound       = 4 gamma  for g  (Proposition 1);  3 gamma (2 A_max mean(A'^2))^(1/3)  for g'  (Proposition 2)

with A_max = (G-1) / sqrt(G), the largest advantage under the sample standard deviation. Proposition 2 takes the second
moment in place of the variance: with it the bound holds for subsets whose mean is not 0 too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from d3s_megatron import ops, stages
from d3s_megatron.actor.megatron_actor import MegatronActor
from d3s_megatron.actor.parallel import Layout, data_parallel_reduce
from d3s_megatron.algorithms.advantages import GroupAdvantages
from d3s_megatron.algorithms.config import AlgorithmConfig
from d3s_megatron.algorithms.loss_batch import StepTensors
from d3s_megatron.algorithms.normalization import kept_counts, token_weights
from d3s_megatron.algorithms.policy_loss import METRICS, PolicyLoss, kl_estimate
from d3s_megatron.algorithms.sample_selection import tie_keys
from d3s_megatron.types import Experience, Rollout

LOSS = PolicyLoss("token", clip_low=0.2, clip_high=0.2, dual_clip=None, kl_beta=0.0, kl_kind="k3")  # at ratio 1


def probe(
    actor: MegatronActor,
    rollouts: Sequence[Rollout],
    judged: Experience,
    selected: Experience,
    num_kept: int,
    responses: int,
    layout: Layout,
) -> dict[str, float]:
    """The row of one probe, before the step's update; a collective.

    Args:
        rollouts: this rank's.
        judged, selected: the batch before and after the recipe.
        num_kept: N, for Lemma 1.
        responses: how many of them give gamma; 0 takes no gradients.
    """
    whole = GroupAdvantages()(judged, 0)  # divided by the standard deviation, which the propositions take for granted
    row: dict[str, float] = dict(_lemma_1(whole, num_kept))
    if not whole.kept.any():
        return row
    batch = _scored(actor, rollouts, whole, layout)
    row |= _means(batch, layout)
    if responses:
        kept = _scored(actor, rollouts, replace(whole, kept=selected.kept), layout)
        gamma = _gamma(actor, batch, whole, responses, layout)
        group = int(whole.group_ids.bincount().max())
        largest = (group - 1) / group**0.5
        square = float((whole.advantages[selected.kept] ** 2).mean()) if selected.kept.any() else 0.0
        row |= {
            "probe/gamma": gamma,
            "probe/grad_norm_all": _norm(actor, batch, layout),
            "probe/grad_norm_kept": _norm(actor, kept, layout),
            "probe/bound_all": 4 * gamma,
            "probe/bound_kept": 3 * gamma * (2 * largest * square) ** (1 / 3),
        }
    return row


def _scored(actor: MegatronActor, rollouts: Sequence[Rollout], rows: Experience, layout: Layout) -> stages.Batch:
    one_step = AlgorithmConfig(num_minibatches=1)
    shares_prompts = actor.config.shares_prompts
    return stages.score(stages.redistribute(rollouts, rows, one_step, layout, share_prompts=shares_prompts), actor)


def _means(batch: stages.Batch, layout: Layout) -> dict[str, float]:
    """Entropy and KL to the first weights (k3), per response token of the whole batch."""
    sums = torch.zeros(3, dtype=torch.float64)
    has_reference = 0
    for score in batch.scored():
        sums[0] += len(score.entropy)
        sums[1] += score.entropy.double().sum()
        if score.ref_log_probs is not None:
            has_reference = 1
            sums[2] += kl_estimate(score.old_log_probs, score.ref_log_probs, "k3").double().sum()
    reduce = data_parallel_reduce(layout)
    has_reference = int(reduce(torch.tensor([has_reference]), "max"))
    num, entropy, kl = reduce(sums, "sum").tolist()
    row = {"probe/entropy": entropy / max(1.0, num)}
    return row | ({"probe/kl": kl / max(1.0, num)} if has_reference else {})


def _norm(actor: MegatronActor, batch: stages.Batch, layout: Layout) -> float:
    """Norm of the policy gradient of plain GRPO (each response's mean over its tokens) on these samples."""
    everything = tuple(torch.ones(len(s.response_ids), dtype=torch.bool) for s in batch.samples)
    counts = data_parallel_reduce(layout)(kept_counts(everything), "sum")
    weights = token_weights("seq_mean_full", everything, 1, counts)
    tensors = StepTensors(batch.samples, batch.scores, everything, everything, weights, weights)
    return actor.gradient_norm(
        batch.samples, everything, lambda row: tensors.loss_batch(row, layout.device), LOSS, len(METRICS)
    )


def _gamma(actor: MegatronActor, batch: stages.Batch, whole: Experience, responses: int, layout: Layout) -> float:
    """Half the largest norm(m_i) among responses drawn by hash, the same ones on every rank."""
    pool = whole.uids[whole.kept]
    drawn = pool[tie_keys(whole)[whole.kept].argsort()[:responses]].tolist()
    mine = {sample.uid: i for i, sample in enumerate(batch.samples)}
    scores, norms = batch.scored(), []
    for uid in drawn:
        at = [mine[uid]] if uid in mine else []
        one = stages.Batch(
            tuple(replace(batch.samples[i], advantage=1.0) for i in at), (len(at),), tuple(scores[i] for i in at)
        )
        norms.append(_norm(actor, one, layout))
    return max(norms) / 2


def _lemma_1(whole: Experience, num_kept: int) -> dict[str, int]:
    """Groups whose rewards differ, and those whose N of largest variance fall short of variance 1 (there are none)."""
    checked = failed = 0
    for group in whole.group_ids[whole.kept].unique():
        values = whole.advantages[(whole.group_ids == group) & whole.kept]
        if values.max() == values.min():
            continue
        size = max(2, min(num_kept, len(values)))
        chosen = ops.max_variance_subset(values, size, torch.arange(len(values)))
        checked += 1
        failed += float(values[chosen].var()) < 1 - 1e-9
    return {"probe/lemma_1_groups": checked, "probe/lemma_1_failures": failed}
