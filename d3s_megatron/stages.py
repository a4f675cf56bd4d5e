"""The stages of one training step, each taking the record of the one before; learner.py calls them in order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from d3s_megatron.actor.config import ActorConfig
from d3s_megatron.actor.exchange import share_out
from d3s_megatron.actor.megatron_actor import MegatronActor, UpdateResult
from d3s_megatron.actor.parallel import Layout, data_parallel_reduce, gather_rows, world_reduce
from d3s_megatron.algorithms.config import AlgorithmConfig
from d3s_megatron.algorithms.loss_batch import StepTensors
from d3s_megatron.algorithms.normalization import kept_counts, token_weights
from d3s_megatron.algorithms.policy_loss import METRICS, PolicyLoss
from d3s_megatron.algorithms.recipes import Recipe
from d3s_megatron.algorithms.rollout_correction import correction
from d3s_megatron.algorithms.schedules import Amounts
from d3s_megatron.algorithms.token_selection import AllTokens
from d3s_megatron.evaluate import rank_share
from d3s_megatron.ragged import Ragged
from d3s_megatron.rollout import Answers, Sampling, make_requests
from d3s_megatron.types import Experience, Prompt, Rollout, Sample, Scores, Verdict


def generate(
    engine: Answers,
    prompts: Sequence[Prompt],
    num_samples: int,
    sampling: Sampling,
    seed: int,
    step: int,
    layout: Layout,
    share: Sequence[int] | None = None,
) -> list[Rollout]:
    """Stage 2: this rank's share of the batch's P x G rollouts, in uid order.

    `share` are the prompts that this rank answers, in the order to begin with; by default as many as any other has.
    """
    if share is None:
        share = rank_share(len(prompts), layout.rank, layout.world_size)
    requests = make_requests([prompts[i] for i in share], num_samples, seed, step, share)
    rollouts = engine.generate(requests, sampling)  # a rank without prompts too: ranks may share an engine
    return sorted(rollouts, key=lambda rollout: rollout.request.uid)


def judge(
    rollouts: Sequence[Rollout],
    verdicts: Sequence[Verdict],
    truncated: str,
    seed: int,
    step: int,
    layout: Layout,
    most: int = 0,
) -> Experience:
    """Stage 3: this rank's verdicts, gathered into the batch's Experience, the same on every rank.

    `truncated` says what an answer cut at the length limit is worth (AlgorithmConfig.truncated; method 4, row 24);
    `most`, on every rank alike, how many rollouts a rank is thought to have made.
    """
    columns = 7
    rows = torch.tensor(
        [
            (
                *(r.request.uid, r.request.group_id, v.value, len(r.token_ids), r.finish_reason == "length"),
                *(len(r.request.prompt.token_ids), layout.rank),
            )
            for r, v in zip(rollouts, verdicts, strict=True)
        ],
        dtype=torch.float64,
    )
    table = torch.cat(gather_rows(rows.flatten(), layout, columns * most)).view(-1, columns)
    table = table[table[:, 0].argsort()]
    _, groups, rewards, lengths, cut, prompt_lengths, makers = table.unbind(1)
    if truncated != "judge":
        rewards = torch.where(cut.bool(), 0.0 if truncated == "wrong" else math.nan, rewards)
    return Experience.new(seed, step, groups, rewards, lengths, cut, prompt_lengths, makers)


@dataclass(frozen=True)
class Batch:
    """This data-parallel rank's kept samples, mini-batch after mini-batch, with what is known of their tokens."""

    samples: tuple[Sample, ...]
    sizes: tuple[int, ...]  # samples of each mini-batch
    scores: tuple[Scores, ...] | None = None  # None: not scored yet
    keep: Ragged = Ragged.of((), torch.bool)
    dropped: tuple[Sample, ...] = ()  # rollouts that were not kept and are scored all the same, for comparison

    def scored(self) -> tuple[Scores, ...]:
        """The scores, after the stage that gives them."""
        assert self.scores is not None, "this batch is not scored yet"
        return self.scores

    def minibatches(self) -> list[slice]:
        """Where each mini-batch stands in the lists."""
        ends = torch.tensor(self.sizes).cumsum(0).tolist()
        return [slice(end - size, end) for end, size in zip(ends, self.sizes, strict=True)]


def redistribute(
    rollouts: Sequence[Rollout],
    experience: Experience,
    config: AlgorithmConfig,
    layout: Layout,
    with_dropped: bool = False,
    share_prompts: bool = True,
) -> Batch:
    """Stage 6: the kept rollouts, balanced over the data-parallel ranks; `with_dropped` carries the others too.

    `share_prompts` says whether rollouts of a prompt that meet on a rank can share it there.
    """
    kept = experience.kept
    parts = share_out(rollouts, experience, kept, config.num_minibatches, layout, share_prompts)
    dropped = tuple(share_out(rollouts, experience, ~kept, 1, layout, share_prompts)[0]) if with_dropped else ()
    return Batch(tuple(s for part in parts for s in part), tuple(len(part) for part in parts), dropped=dropped)


def score(batch: Batch, actor: MegatronActor, with_reference: bool = True) -> Batch:
    """Stage 7: old log-probs and entropies, for kept rollouts only; the first weights' log-probs where asked for."""
    scores = actor.score((*batch.samples, *batch.dropped), with_reference)
    return replace(batch, scores=tuple(scores[: len(batch.samples)]))


def scores_in_update(config: AlgorithmConfig, actor: ActorConfig, recipe: Recipe, loss: PolicyLoss) -> bool:
    """Whether the update's own forward pass gives the scores: nothing before it needs them, and it has all of them."""
    return (
        actor.score_in_update
        and actor.select_before_scoring
        and isinstance(recipe.tokens, AllTokens)
        and not loss.kl_beta
        and config.num_epochs * config.num_minibatches == 1
        and (config.rollout_correction or "none") == "none"
    )


def select_tokens(batch: Batch, recipe: Recipe, amounts: Amounts, experience: Experience, layout: Layout) -> Batch:
    """Stage 8: the tokens that are trained on, chosen over all ranks."""
    masks = recipe.tokens(
        batch.samples,
        batch.scores,
        amounts.token_share,
        experience.seed,
        experience.step,
        data_parallel_reduce(layout),
    )
    return replace(batch, keep=masks)


def update(
    batch: Batch,
    actor: MegatronActor,
    loss: PolicyLoss,
    config: AlgorithmConfig,
    max_length: int,
    reselect: Callable[[Batch], Batch],
) -> tuple[Batch, list[UpdateResult]]:
    """Stages 9 and 10: `num_epochs` x `num_minibatches` optimizer steps; the batch has its scores after them.

    A mini-batch without a signal takes none: no kept token with an advantage, and no KL to follow (method 4, row 8).
    `reselect` scores and selects anew before every step but the first, where `token_entropy` is "current".
    """
    results: list[UpdateResult] = []
    for _ in range(config.num_epochs):
        for part in batch.minibatches():
            if config.token_entropy == "current" and results:
                batch = reselect(batch)
            tensors, has_signal = _step_tensors(batch, part, loss, config, max_length, actor.layout)
            if not has_signal:
                results.append(UpdateResult.skipped(actor.lr, len(METRICS)))
                continue
            results.append(
                actor.update(
                    tensors.samples,
                    tensors.scored,
                    lambda row, tensors=tensors: tensors.loss_batch(row, actor.layout.device),
                    loss,
                    len(METRICS),
                )
            )
    if batch.scores is None:  # neither did the update, where there was nothing to learn from
        batch = (
            score(batch, actor, with_reference=False)
            if results[0].scores is None
            else replace(batch, scores=results[0].scores)
        )
    return batch, results


def _step_tensors(
    batch: Batch, part: slice, loss: PolicyLoss, config: AlgorithmConfig, max_length: int, layout: Layout
) -> tuple[StepTensors, bool]:
    """What the loss reads of a mini-batch; whether any rank has a kept token that the loss can learn from."""
    samples, keep = batch.samples[part], batch.keep[part]
    kl_of_all = config.kl_tokens == "all" and bool(loss.kl_beta)
    scored = keep
    if kl_of_all or loss.reads_all_tokens:
        scored = Ragged.full(keep.lengths, True)
    speaks = torch.tensor([sample.advantage != 0 or bool(loss.kl_beta) for sample in samples], dtype=torch.bool)
    num_heard = (keep.flat & speaks[keep.owner]).sum()[None]
    counts = torch.cat([kept_counts(keep), kept_counts(scored), num_heard])
    of_kept, of_scored, num_heard = data_parallel_reduce(layout)(counts, "sum").split([3, 3, 1])
    weights: Sequence[Tensor] = token_weights(config.loss_normalization, keep, max_length, of_kept)
    kl_weights = token_weights(config.loss_normalization, scored, max_length, of_scored) if kl_of_all else weights
    level = config.rollout_correction or "none"
    if level != "none":
        cap = config.rollout_correction_cap
        weights = [
            weight * correction(score.old_log_probs, torch.tensor(sample.rollout_log_probs), level, cap)
            for weight, score, sample in zip(weights, batch.scored()[part], samples, strict=True)
        ]
    scores = None if batch.scores is None else batch.scores[part]
    return StepTensors(samples, scores, keep, scored, weights, kl_weights), bool(num_heard)


def reselect_tokens(actor: MegatronActor, select: Callable[[Batch], Batch]) -> Callable[[Batch], Batch]:
    """For `update`: entropies of the present policy, old log-probs as they were, and a new selection."""

    def reselect(batch: Batch) -> Batch:
        fresh = actor.score(batch.samples, with_reference=False)
        mixed = [replace(old, entropy=new.entropy) for old, new in zip(batch.scored(), fresh, strict=True)]
        return select(replace(batch, scores=tuple(mixed)))

    return reselect


@dataclass(frozen=True)
class Measured:
    """What scoring and token selection say of a batch, over all ranks."""

    metrics: dict[str, float]  # for the log; mismatch_*: of the trainer's log-probs from the engine's, in nats
    also: list[float]  # the sums of what the ranks were given to add up beside


def measure(batch: Batch, layout: Layout, also: Sequence[float] = ()) -> Measured:
    """Numbers of a batch that is scored and selected from; one collective over all ranks."""
    none = torch.zeros(0)
    entropy = torch.cat([none, *(s.entropy for s in batch.scored())]).double()
    keep = batch.keep.flat
    old = torch.cat([none, *(s.old_log_probs for s in batch.scored())]).double()
    rollout = torch.tensor([p for s in batch.samples for p in s.rollout_log_probs]).double()
    diff = old - rollout
    k3 = torch.expm1(diff) - diff  # of KL(rollout || trainer)
    own = [len(entropy), keep.sum(), entropy.sum(), entropy[keep].sum(), diff.abs().sum(), k3.sum()]
    worst = torch.zeros(layout.world_size)  # a place a rank, as sums are all that is asked for
    worst[layout.rank] = diff.abs().max() if len(diff) else 0.0
    # The ranks of a replica have the same samples: one of them speaks.
    values = torch.tensor([*own, *worst] if layout.speaks else [0.0] * (len(own) + len(worst)), dtype=torch.float64)
    sums = world_reduce(layout)(torch.cat([values, torch.tensor(list(also), dtype=torch.float64)]), "sum")
    num, num_kept, all_entropy, kept_entropy, mismatch, mismatch_kl = sums[: len(own)].tolist()
    metrics = {
        "num_scored_tokens": int(num),
        "num_kept_tokens": int(num_kept),
        "kept_token_share": num_kept / max(1.0, num),
        "entropy": all_entropy / max(1.0, num),
        "entropy_kept": kept_entropy / max(1.0, num_kept),
        "mismatch_mean": mismatch / max(1.0, num),
        "mismatch_max": float(sums[len(own) : len(values)].max()),
        "mismatch_kl": mismatch_kl / max(1.0, num),
    }
    return Measured(metrics, sums[len(values) :].tolist())


def check_mismatch(mismatch: float, limit: float, step: int) -> None:
    """RuntimeError where it is above `limit` nats a token on average; a limit of 0 never looks.

    Every rollout is a probe of the last weight sync: it is looked at before anything that it trained is kept (fault
    G04).
    """
    if limit and not mismatch <= limit:
        raise RuntimeError(
            f"step {step + 1}: log-probs of trainer and rollout engine differ by {mismatch:.3g} nats a token, above "
            f"rollout.max_mismatch {limit:g}: the engine holds other weights than the trainer, or samples in another "
            "way (rollout.top_p, top_k, dtype), or is behind by too large a step (rollout.ahead, optimizer.lr)"
        )


def update_metrics(results: Sequence[UpdateResult], has_reference: bool) -> dict[str, float]:
    """Means over the optimizer steps of a batch, per kept token where that is the unit."""
    counts = {"num_updates": sum(r.stepped for r in results), "lr": results[-1].lr}
    counts["num_skipped_updates"] = len(results) - counts["num_updates"]
    counts["num_bad_updates"] = sum(not r.stepped and bool(r.totals[1]) for r in results)  # not finite, so not taken
    tried = [result for result in results if result.totals[1]]  # with a kept token
    if not tried:
        return counts
    totals = torch.stack([result.totals for result in tried]).mean(0)
    named = dict(zip(("loss", *METRICS), totals.tolist(), strict=True))
    num = named["num_tokens"]
    norms = [result.grad_norm for result in tried if result.stepped]
    return (
        counts
        | ({"kl": named["kl"] / num} if has_reference else {})
        | {
            "loss": named["loss"],
            "policy_kl": named["policy_kl"] / num,
            "ratio": named["ratio"] / num,
            "clip_fraction": named["num_clipped"] / num,
            "dual_clip_fraction": named["num_dual_clipped"] / num,
            "grad_norm": sum(norms) / len(norms) if norms else float("nan"),
        }
    )
