"""One answer against one gold, as mathematics; runs inside a worker process."""

from __future__ import annotations

from d3s_megatron.rewards.equal import equal, is_parsable
from d3s_megatron.rewards.extract import final_answer
from d3s_megatron.rewards.library import library_reads


def judge(text: str, gold: str) -> tuple[float, str]:
    """(value, status) of an answer text."""
    if not is_parsable(gold):
        return 0.0, "unparsable_gold"
    answer = final_answer(text)
    if answer is None:
        return 0.0, "no_answer"
    return (1.0, "right") if equal(gold, answer) else (0.0, "wrong")


def judge_gold(_: str, gold: str) -> tuple[float, str]:
    """("right" status) where a gold can be compared with answers."""
    return (1.0, "right") if is_parsable(gold) else (0.0, "unparsable_gold")


def warm_up() -> None:
    """Judge one answer of each kind, so that workers are forked with the parser's tables loaded."""
    for gold in ("1", r"\frac{1}{2}", r"x^2+\sqrt{3}"):
        judge(rf"\boxed{{{gold}}}", gold)
        equal(gold, gold + "+1")
    library_reads(r"\sum_{k=1}^{n} k")
