"""Which answers vote for the same thing in maj@k.

Answers vote by what they say, not by what the gold makes of it: two spellings of one wrong answer must not split their
votes where those of the right one would not. Numbers (integers, decimals, fractions, mixed numbers, powers of ten) are
the same where their exact values are; anything else is, where the cleaned spelling is. So `0.5` and `\\frac12` vote
together, while `x+1` and `1+x` do not: a full comparison of every pair would need the mathematics library, in worker
processes, for up to n * (n - 1) / 2 pairs a problem.
"""

from __future__ import annotations

from fractions import Fraction

from d3s_megatron.rewards import RewardConfig, final_answer
from d3s_megatron.rewards.clean import clean, squeeze
from d3s_megatron.rewards.numbers import read_number

MAX_DECIMAL_BITS = 10_000  # Python refuses to write more than 4,300 decimal digits
MAX_CLEANED = 200  # characters of an answer that is normalised; a longer one votes by its spelling as it is


def vote_of(text: str, rewards: RewardConfig) -> str | None:
    """What an answer text votes for under a reward; None where it has no answer.

    For `exact` that is the whole text, for `math_verify` the final answer (rewards/extract.py), and for a function of
    the user's the final answer, or the whole text where there is none.
    """
    whole = text.strip() or None
    if rewards.kind == "exact":
        return whole
    answer = final_answer(text)
    if answer is not None:
        return normalised(answer)
    return None if "math_verify" in (rewards.kind, *rewards.mixture) else whole


def normalised(answer: str) -> str | None:
    """One string for all spellings of a number, and for spellings of anything else that differ by TeX alone."""
    if len(answer) > MAX_CLEANED:
        return answer
    cleaned = clean(answer)
    number = read_number(cleaned)
    if number is not None:
        return _written(number.value)
    return squeeze(cleaned) or None


def _written(value: Fraction) -> str:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_DECIMAL_BITS:
        return f"{value.numerator:#x}/{value.denominator:#x}"
    return str(value)
