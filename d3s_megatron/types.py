"""The nouns that flow through a training step, in the order in which they appear.

Every record is frozen; a stage takes one record and returns the next.

Shape legend, used in every file of this package:
    P  prompts in a batch           G  rollouts per prompt        N  rollouts in a batch (P * G)
    K  kept rollouts (K <= N)       T  tokens of a packed row     n  segments of a packed row
    S  scored positions in a row: one per response token          V  vocabulary (V_tp: one rank's shard)
    L  response tokens of one rollout, the end-of-sequence token included where it was sampled
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

FinishReason = Literal["stop", "length"]

# In-place reduction of a small tensor over the ranks that share one batch: reduce(tensor, "sum" | "max" | "min").
Reduce = Callable[[Tensor, str], Tensor]


@runtime_checkable
class RankedReduce(Protocol):
    """A `Reduce` that lets a caller put what each rank has side by side in one reduction."""

    @property
    def rank(self) -> int: ...  # this one
    @property
    def num_ranks(self) -> int: ...
    def __call__(self, tensor: Tensor, op: str, /) -> Tensor: ...


@dataclass(frozen=True)
class Prompt:
    """One question with its reference answer.

    Example: Prompt(id="gsm8k-3", text="...", token_ids=(9906, 11), answer="42")
    """

    id: str
    text: str  # after the chat template: exactly what token_ids encode
    token_ids: tuple[int, ...]
    answer: str


@dataclass(frozen=True)
class Request:
    """One rollout asked for; `uid` and `seed` are fixed when it is issued, never by completion order."""

    uid: int  # 0..N-1 within the step: group_id * G + sample
    group_id: int  # slot of the prompt in the batch, 0..P-1
    prompt: Prompt
    seed: int  # from (run seed, step, uid): the same whatever engine or rank answers


@dataclass(frozen=True)
class Rollout:
    """One answer as it was sampled; token ids are never decoded and encoded again."""

    request: Request
    token_ids: tuple[int, ...]  # [L]
    log_probs: tuple[float, ...]  # [L] natural log, at the sampling temperature
    finish_reason: FinishReason
    text: str  # decoded without special tokens, for rewards and people only


@dataclass(frozen=True)
class Verdict:
    """What a reward function says of one answer; `value` is NaN where no verdict could be reached."""

    value: float
    status: str  # right, wrong, no_answer, unparsable_gold, timeout, crash


@dataclass(frozen=True)
class Experience:
    """What selection sees of a batch: one row per rollout, the same on every rank, ordered by uid.

    `credit` steps (see algorithms/recipes.py) return replacements of it.
    """

    seed: int
    step: int
    uids: Tensor  # [N] int64
    group_ids: Tensor  # [N] int64
    rewards: Tensor  # [N] float64, not finite where there is no verdict
    lengths: Tensor  # [N] int64, response tokens
    truncated: Tensor  # [N] bool, cut at the length limit
    prompt_lengths: Tensor  # [N] int64, tokens of its prompt
    makers: Tensor  # [N] int64, the rank that made it and holds its tokens
    advantages: Tensor  # [N] float64; zeros until a group_advantages step has run
    kept: Tensor  # [N] bool; all True until a selection step has run

    @staticmethod
    def new(
        seed: int,
        step: int,
        group_ids: Tensor,
        rewards: Tensor,
        lengths: Tensor,
        truncated: Tensor | None = None,
        prompt_lengths: Tensor | None = None,
        makers: Tensor | None = None,
    ) -> Experience:
        """Rows in uid order; a reward that is not finite takes its rollout out of the batch at once (fault D05)."""
        num = len(rewards)
        none = torch.zeros(num, dtype=torch.int64)
        rewards = rewards.to(torch.float64)
        return Experience(
            seed=seed,
            step=step,
            uids=torch.arange(num),
            group_ids=group_ids.to(torch.int64),
            rewards=rewards,
            lengths=lengths.to(torch.int64),
            truncated=(none if truncated is None else truncated).to(torch.bool),
            prompt_lengths=none if prompt_lengths is None else prompt_lengths.to(torch.int64),
            makers=none if makers is None else makers.to(torch.int64),
            advantages=torch.zeros(num, dtype=torch.float64),
            kept=rewards.isfinite(),
        )


@dataclass(frozen=True)
class Sample:
    """A kept rollout on its way through the actor; ids only, so that it can move between ranks."""

    uid: int
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]  # [L]
    rollout_log_probs: tuple[float, ...]  # [L]
    advantage: float


@dataclass(frozen=True)
class Scores:
    """What the scoring pass says of one sample's response tokens; no gradient."""

    old_log_probs: Tensor  # [L] float32
    entropy: Tensor  # [L] float32, nats
    ref_log_probs: Tensor | None  # [L] float32, only where a reference model is scored


@dataclass(frozen=True)
class TokenBatch:
    """One packed row of samples, a micro-batch of one data-parallel rank.

    The row is cut into segments. One holds a whole sample, or a prompt, or a response that continues the segment of
    its prompt: samples of one prompt can so share its tokens. `rows[s]` is the position in the row whose hidden state
    predicts `targets[s]`; prompt tokens, padding and the token after a sample's end are never scored, so no label
    crosses a border (fault C08).
    """

    token_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64, restarts at 0 with every segment that continues none
    cu_seqlens: Tensor  # [n + 1] int64, borders of the segments; the last border is T
    prefix: Tensor  # [n] int64, the earlier segment that a segment continues; -1: none
    rows: Tensor  # [S] int64
    targets: Tensor  # [S] int64
    token_index: Tensor  # [S] int64, which of the response tokens of all the rank's samples, laid end to end
    sequence: Tensor  # [S] int64, which of the row's samples
    samples: tuple[int, ...]  # indices into the rank's sample list, one per sequence that has scored rows


@dataclass(frozen=True)
class LossBatch:
    """Everything the loss needs beside the new log-probs, for the scored rows of one TokenBatch."""

    old_log_probs: Tensor | None  # [S]; None: those of the very pass that reads this
    rollout_log_probs: Tensor  # [S]
    ref_log_probs: Tensor | None  # [S]
    advantages: Tensor  # [S] that of the sample
    keep: Tensor  # [S] bool: in T, the selected tokens
    weights: Tensor  # [S] float32: c_i / Z of method 1.10, global over ranks and micro-batches; 0 for dropped tokens
    kl_weights: Tensor  # [S] float32: the same for the KL term, which may cover dropped tokens too
    sequence: Tensor  # [S] int64
    num_sequences: int
