"""From a file of generations to verdicts, without a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from d3s_megatron.evaluate.generations import Generation, lines, write_whole
from d3s_megatron.evaluate.summary import CORRECT_FROM, Answer
from d3s_megatron.evaluate.votes import vote_of
from d3s_megatron.rewards import Reward, RewardConfig
from d3s_megatron.types import Verdict

FOLDER = "graded"
AT_ONCE = 2048  # answers between two words about progress


def answer_of(text: str, num_tokens: int, cut: bool, verdict: Verdict, rewards: RewardConfig) -> Answer:
    """An answer text with its verdict as what evaluation counts."""
    return Answer(
        solved=None if math.isnan(verdict.value) else verdict.value >= CORRECT_FROM,
        status=verdict.status,
        vote=vote_of(text, rewards),
        num_tokens=num_tokens,
        cut=cut,
    )


def grade(
    problems: Sequence[Sequence[Generation]],
    reward: Reward,
    rewards: RewardConfig,
    path: Path,
    progress: Callable[[int, int], None] = lambda done, num: None,
) -> list[list[Answer]]:
    """Answers [P][n] with their verdicts, which are also written to `path`, a line an answer.

    The same rows give the same bytes, unless an answer is at the edge of the deadline (its status is timeout then).
    """
    rows = [row for problem in problems for row in problem]
    verdicts = []
    for first in range(0, len(rows), AT_ONCE):
        part = rows[first : first + AT_ONCE]
        verdicts += reward.grade([(row.text, row.gold) for row in part])
        progress(first + len(part), len(rows))
    answers = [
        answer_of(row.text, row.num_tokens, row.finish == "length", verdict, rewards)
        for row, verdict in zip(rows, verdicts, strict=True)
    ]
    write_whole(
        path,
        lines(
            {
                "id": row.id,
                "sample": row.sample,
                "status": verdict.status,
                "value": None if math.isnan(verdict.value) else verdict.value,
                "vote": answer.vote,
            }
            for row, verdict, answer in zip(rows, verdicts, answers, strict=True)
        ),
    )
    num = len(problems[0])
    return [answers[first : first + num] for first in range(0, len(answers), num)]
