"""What a step learns from its rollouts: training, replay and the doctor all take this one way through the stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from d3s_megatron import stages
from d3s_megatron.actor.megatron_actor import MegatronActor, UpdateResult
from d3s_megatron.algorithms.config import AlgorithmConfig
from d3s_megatron.algorithms.metrics import selection_metrics
from d3s_megatron.algorithms.policy_loss import PolicyLoss
from d3s_megatron.algorithms.recipes import Recipe
from d3s_megatron.algorithms.schedules import Amounts
from d3s_megatron.types import Experience, Rollout, Verdict

Clock = Callable[[str], AbstractContextManager[None]]


def untimed(stage: str) -> AbstractContextManager[None]:
    """A clock for those who do not look at it."""
    return nullcontext()


@dataclass(frozen=True)
class Learned:
    """One step, from judged rollouts to the update."""

    judged: Experience
    selected: Experience
    batch: stages.Batch
    updates: list[UpdateResult]
    row: dict[str, Any]  # what the log says of it, but for times and verdict counts
    also: list[float]  # sums over all ranks


@dataclass(frozen=True)
class Learner:
    """Takes optimizer steps on rollouts; every rank calls it with its own."""

    algorithm: AlgorithmConfig
    recipe: Recipe
    loss: PolicyLoss
    actor: MegatronActor
    max_length: int  # the longest answer that may be generated
    max_mismatch: float = 0.0  # see stages.check_mismatch

    def step(
        self,
        seed: int,
        step: int,
        amounts: Amounts,
        rollouts: Sequence[Rollout],
        verdicts: Sequence[Verdict],
        clock: Clock = untimed,
        most: int = 0,
        also: Sequence[float] = (),
        before_update: Callable[[Experience, Experience], None] = lambda judged, selected: None,
    ) -> Learned:
        """Selects, scores and updates; a collective.

        Args:
            rollouts, verdicts: this rank's; `most` on every rank alike, how many a rank is thought to have.
            clock: is entered for every stage.
            also: numbers to be added up over all ranks on the way.
            before_update: is called with the batch before and after its selection, once its tokens are chosen.
        """
        algorithm, recipe, loss, actor = self.algorithm, self.recipe, self.loss, self.actor
        layout, config = actor.layout, actor.config
        late = stages.scores_in_update(algorithm, config, recipe, loss)
        with clock("reward"):
            judged = stages.judge(rollouts, verdicts, algorithm.truncated, seed, step, layout, most)
        with clock("select"):
            selected = recipe.apply(judged, amounts.num_kept)
            score_all = not config.select_before_scoring
            batch = stages.redistribute(rollouts, selected, algorithm, layout, score_all, config.shares_prompts)
        with clock("score"):
            if not late:
                batch = stages.score(batch, actor, with_reference=loss.kl_beta > 0)
        with clock("tokens"):
            select = partial(stages.select_tokens, recipe=recipe, amounts=amounts, experience=selected, layout=layout)
            batch = select(batch)
            if not late:
                measured = self._measure(batch, also, step)
        before_update(judged, selected)
        with clock("update"):
            reselect = stages.reselect_tokens(actor, select)
            batch, updates = stages.update(batch, actor, loss, algorithm, self.max_length, reselect)
            if late or algorithm.token_entropy == "current":
                measured = self._measure(batch, also, step)
        row = {"step": step, "progress": amounts.progress, "N": amounts.num_kept, "rho": amounts.token_share}
        row |= selection_metrics(judged, selected, recipe.advantages_of_all(judged))
        row |= measured.metrics | stages.update_metrics(updates, loss.kl_beta > 0)
        return Learned(judged, selected, batch, updates, row, measured.also)

    def _measure(self, batch: stages.Batch, also: Sequence[float], step: int) -> stages.Measured:
        measured = stages.measure(batch, self.actor.layout, also)
        stages.check_mismatch(measured.metrics["mismatch_mean"], self.max_mismatch, step)
        return measured
