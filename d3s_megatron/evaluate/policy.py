"""Evaluation within a training run: the held-out problems, with the engine and the reward that training uses."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from d3s_megatron.evaluate.grading import answer_of
from d3s_megatron.evaluate.summary import Answer, Evaluation, PassKind, summarise
from d3s_megatron.rewards import STATUSES, Reward, RewardConfig, grade_rollouts
from d3s_megatron.rollout import RolloutEngine, Sampling, make_requests
from d3s_megatron.types import Prompt

PASS_AT = (1, 2, 4, 8, 16, 32, 64)
EVAL_STEP = -1  # evaluation draws the same random numbers every time, so before and after differ by weights alone

GatherRows = Callable[[Tensor], list[Tensor]]


def rank_share(num: int, rank: int, world_size: int) -> range:
    """The slots of one rank, contiguous; sizes differ by at most one."""
    return range(num * rank // world_size, num * (rank + 1) // world_size)


def evaluate_policy(
    engine: RolloutEngine,
    reward: Reward,
    prompts: Sequence[Prompt],
    num_samples: int,
    sampling: Sampling,
    seed: int,
    share: range,
    gather: GatherRows,
    rewards: RewardConfig | None = None,
    pass_kind: PassKind = "unbiased",
) -> Evaluation:
    """Samples `num_samples` answers a prompt and judges them; a collective, each rank does its `share` of prompts.

    `rewards` is the configuration that `reward` was made of; it says what an answer votes for in maj@k.
    """
    mine = [prompts[i] for i in share]
    requests = make_requests(mine, num_samples, seed, EVAL_STEP, share)
    rollouts = engine.generate(requests, sampling)  # a rank without prompts too: ranks may share an engine
    verdicts = grade_rollouts(reward, rollouts)
    answers = [
        answer_of(r.text, len(r.token_ids), r.finish_reason == "length", v, rewards or RewardConfig())
        for r, v in zip(rollouts, verdicts, strict=True)
    ]
    rows = torch.tensor([_as_numbers(answer) for answer in answers], dtype=torch.int64)
    table = torch.cat(gather(rows.flatten())).view(len(prompts), num_samples, -1)
    everyone = [[_from_numbers(row) for row in problem] for problem in table.tolist()]
    return summarise("held-out", everyone, PASS_AT, seed, pass_kind)


def _as_numbers(answer: Answer) -> tuple[int, ...]:
    """An answer as it travels between ranks; a vote is only ever compared, so that a hash of it will do."""
    vote = 0
    if answer.vote is not None:
        vote = int.from_bytes(hashlib.sha256(str(answer.vote).encode()).digest()[:8], "little", signed=True)
    status = STATUSES.index(answer.status) if answer.status in STATUSES else -1
    return -1 if answer.solved is None else int(answer.solved), status, vote, answer.num_tokens, int(answer.cut)


def _from_numbers(row: Sequence[int]) -> Answer:
    solved, status, vote, num_tokens, cut = row
    return Answer(
        solved=None if solved < 0 else bool(solved),
        status=STATUSES[status] if status >= 0 else "other",
        vote=vote or None,
        num_tokens=num_tokens,
        cut=bool(cut),
    )
