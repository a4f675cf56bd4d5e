"""Values of the tokens of several samples, laid end to end: a thousand samples are one tensor, not a thousand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import overload

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Ragged(Sequence[Tensor]):
    """A sequence of tensors [L], one a sample, that share one tensor.

    Example: Ragged.of([torch.ones(2), torch.zeros(1)])[0] is tensor([1., 1.])
    """

    flat: Tensor  # [sum L]
    lengths: tuple[int, ...]

    @staticmethod
    def of(values: Sequence[Tensor], dtype: torch.dtype = torch.float32) -> Ragged:
        """The same of any sequence; `dtype` is that of no values at all."""
        if isinstance(values, Ragged):
            return values
        flat = torch.cat(list(values)) if len(values) else torch.zeros(0, dtype=dtype)
        return Ragged(flat, tuple(len(value) for value in values))

    @staticmethod
    def full(lengths: Sequence[int], value: bool | float) -> Ragged:
        """`value` for every token."""
        return Ragged(torch.full((sum(lengths),), value), tuple(lengths))

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.flat.split(list(self.lengths)))

    @overload
    def __getitem__(self, which: int) -> Tensor: ...
    @overload
    def __getitem__(self, which: slice) -> Ragged: ...
    def __getitem__(self, which: int | slice) -> Tensor | Ragged:
        ends = [0, *accumulate(self.lengths)]
        if isinstance(which, int):
            at = range(len(self))[which]
            return self.flat[ends[at] : ends[at + 1]]
        first, last, step = which.indices(len(self))
        assert step == 1, "a slice with a step has no tensor of its own"
        last = max(first, last)
        return Ragged(self.flat[ends[first] : ends[last]], self.lengths[first:last])

    @cached_property
    def owner(self) -> Tensor:
        """[sum L] int64, which sample each token is of; made once, as counts, weights and losses all ask for it."""
        return torch.arange(len(self)).repeat_interleave(torch.tensor(self.lengths, dtype=torch.int64))
