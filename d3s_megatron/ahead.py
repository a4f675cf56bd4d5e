"""Where a training step gets its rollouts from: generated when it asks, or one step ahead while the last one trained.

    in step     generate(t) with w_t | train on it -> w_t+1 | sync | generate(t+1) ...
    one ahead   train on rollouts(t) -> w_t+1, while rollouts(t+1) are generated with w_t | sync | ...

One ahead, the rollouts of every step but the first are one update older than the trainer. Their old log-probs are
still the trainer's, scored with its present weights; the importance weights of `algorithm.rollout_correction` are the
ratio to what the engine sampled from, and so account for the step. A resumed run begins with rollouts of its present
weights, as a first step does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from torch import Tensor

from d3s_megatron.rollout import RolloutEngine
from d3s_megatron.types import Rollout


class RolloutSource:
    """Rollouts of one training step after another.

    Args:
        engine: gets new weights through `sync` only.
        generate: this rank's rollouts of a step; where `ahead`, it runs in a thread and makes no collective call.
        num_steps: after the last step nothing is generated.
    """

    def __init__(
        self, engine: RolloutEngine, generate: Callable[[int], list[Rollout]], num_steps: int, ahead: bool
    ) -> None:
        self._engine, self._generate, self._num_steps, self._ahead = engine, generate, num_steps, ahead
        self._num_syncs = 0
        self._next: tuple[int, int, Future[list[Rollout]]] | None = None  # step, syncs before it, its rollouts

    def take(self, step: int) -> tuple[list[Rollout], int]:
        """The rollouts of `step`, and by how many updates their weights are older than the trainer's."""
        if self._next is not None and self._next[0] == step:
            _, num_syncs, future = self._next
            rollouts, staleness = future.result(), self._num_syncs - num_syncs
        else:
            rollouts, staleness = self._generate(step), 0
            self._engine.rest()  # it has nothing to do until the trainer is done
        self._next = None
        if self._ahead and step + 1 < self._num_steps:
            self._next = step + 1, self._num_syncs, _in_thread(lambda: self._generate(step + 1))
        return rollouts, staleness

    def settle(self) -> None:
        """Waits until nothing is being generated, so that weights can change and others can use the engine."""
        if self._next is not None:
            self._next[2].result()

    def sync(self, stream: Iterable[tuple[str, Tensor]]) -> None:
        """Gives the engine the trainer's new weights."""
        self._engine.load_weights(stream)
        self._num_syncs += 1


def _in_thread(work: Callable[[], list[Rollout]]) -> Future[list[Rollout]]:
    """Starts `work`; a daemon, so that a run that fails does not wait for it."""
    future: Future[list[Rollout]] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as failed:
            future.set_exception(failed)

    threading.Thread(target=run, name="rollouts ahead", daemon=True).start()
    return future
