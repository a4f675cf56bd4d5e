"""The order in which prompts are visited: a pure function of (seed, step), so there is no position to save or lose."""

from __future__ import annotations

import functools

import torch

from d3s_megatron.ops import mix64


class PromptOrder:
    """Seeded epochs without repeats: every prompt once an epoch, every epoch in its own order.

    Batches run on over the end of an epoch, so all of them are full. Resuming needs the step number alone (fault E01).
    """

    def __init__(self, num_prompts: int, batch_size: int, seed: int) -> None:
        """Raises ValueError where there is no prompt or the batch is empty."""
        if num_prompts < 1:
            raise ValueError(f"num_prompts is {num_prompts}: there must be at least one prompt")
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}: a batch needs at least one prompt")
        self.num_prompts = num_prompts
        self.batch_size = batch_size
        self.seed = seed

    def batch(self, step: int) -> list[int]:
        """Indices [batch_size] of the prompts of one step; steps count from 0."""
        if step < 0:
            raise ValueError(f"step is {step}: steps count from 0")
        first = step * self.batch_size
        places = range(first, first + self.batch_size)
        return [self._epoch(place // self.num_prompts)[place % self.num_prompts] for place in places]

    def epoch(self, step: int) -> float:
        """Epochs completed before this step, for logs."""
        return step * self.batch_size / self.num_prompts

    def _epoch(self, epoch: int) -> list[int]:
        return _permutation(self.num_prompts, self.seed, epoch)


@functools.lru_cache(maxsize=4)  # a batch touches two epochs as a rule
def _permutation(num_prompts: int, seed: int, epoch: int) -> list[int]:
    # A hash and not a library's shuffle: the order stays the same whatever version of the library resumes the run.
    keys = mix64(seed, epoch, torch.arange(num_prompts))
    return keys.argsort(stable=True).tolist()
