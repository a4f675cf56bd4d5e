"""The credit step that turns rewards into group advantages (method 1.1)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from d3s_megatron import ops
from d3s_megatron.types import Experience


@dataclass(frozen=True)
class GroupAdvantages:
    """Credit step: fills `advantages` from the rewards of the kept rollouts."""

    normalize_std: bool = True

    needs: ClassVar[frozenset[str]] = frozenset({"rewards"})
    gives: ClassVar[str] = "advantages"
    uses_budget: ClassVar[bool] = False

    def __call__(self, experience: Experience, num_kept: int) -> Experience:
        return replace(
            experience,
            advantages=ops.group_advantages(
                experience.rewards, experience.group_ids, experience.kept, self.normalize_std
            ),
        )
