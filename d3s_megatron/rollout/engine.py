"""What every rollout engine promises. One file per engine implements it; nothing else knows which one runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from d3s_megatron.types import Request, Rollout


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Temperature 0 is greedy decoding, for evaluation only."""

    temperature: float = 1.0
    max_new_tokens: int = 1024  # end-of-sequence included
    top_p: float = 1.0  # 1 is off
    top_k: int = 0  # 0 is off

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}: it must be above 0, or 0 for greedy evaluation")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}: it must be above 0 and at most 1 (1 is off)")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}: it must be at least 0 (0 is off)")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}: it must be at least 1")


def check_length(request: Request, sampling: Sampling, limit: int, whose: str) -> None:
    """ValueError where a prompt is empty, or its longest answer would not fit `limit` positions."""
    num_tokens = len(request.prompt.token_ids)
    if num_tokens == 0:
        raise ValueError(f"prompt {request.prompt.id!r} has no tokens; an answer needs something to follow")
    if num_tokens + sampling.max_new_tokens > limit:
        raise ValueError(
            f"prompt {request.prompt.id!r} has {num_tokens} tokens; with rollout.max_new_tokens "
            f"{sampling.max_new_tokens} that is over {whose} {limit} positions; lower one of the two"
        )


class Answers(Protocol):
    """Prompts in, answers out."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """One rollout a request, in request order.

        An answer depends on its prompt, its seed, `sampling` and the weights, and, up to rounding, on nothing else:
        not on the other requests, their order or the batch size. Its token ids are those sampled. A sampled
        end-of-sequence token is the last id, with its log-prob, and the finish reason is "stop"; an answer cut at
        `max_new_tokens` ends in "length" and nothing is added to it (faults G02, G05).

        Log-probs are natural logs under the distribution drawn from: temperature applied, and renormalised where
        top-p or top-k cut it. Greedy decoding reports those at temperature 1.
        """
        ...


class RolloutEngine(Answers, Protocol):
    """Prompts in, answers out, with weights that can be replaced between two calls."""

    def ask_each(self, requests: Sequence[Request], sampling: Sampling) -> list[tuple[str, Rollout]]:
        """All requests answered by every engine behind this one, to compare them; a collective where `generate` is.

        Each rollout stands with the name of its engine: a server's address, empty for the only engine of this process.
        """
        ...

    def load_weights(self, stream: Iterable[tuple[str, Tensor]]) -> None:
        """Replaces every weight from (Hugging Face name, full tensor) pairs, in any order, cast to the engine's dtype.

        A tied output head is not a name of its own. Raises ValueError for an unknown, repeated or missing name and
        for a wrong shape; an engine that has met one refuses to generate until a whole stream went through.
        """
        ...

    def rest(self) -> None:
        """Frees what it can of the device's memory until the next call, for the trainer; may do nothing."""
        ...

    def close(self) -> None:
        """Frees the engine's memory and processes; the engine cannot be used afterwards."""
        ...
