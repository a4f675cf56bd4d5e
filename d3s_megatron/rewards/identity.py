"""Whether two expression trees are the same: exactly where they are rational, to 40 digits where they are not."""

from __future__ import annotations

from typing import Any

import mpmath

from d3s_megatron.rewards.evaluation import TooLarge, evaluate, exact, precision
from d3s_megatron.rewards.expression import Node, symbols
from d3s_megatron.rewards.numbers import Decimal, rounds_to

_SAME = mpmath.mpf(10) ** -40  # relative; values are worked out to 60 digits
_SMALL = mpmath.mpf(10) ** -15
_NUM_POINTS = 4
_NUM_INTEGER_POINTS = 8


def same_expression(gold: Node, answer: Node, g: Decimal | None = None, a: Decimal | None = None) -> bool:
    """Whether two trees have the same value wherever they have one.

    Rational numbers are compared exactly. Anything else is worked out at several points of its symbols: two different
    formulas that agree there to 40 digits do not occur by chance. `g` and `a` say how finely a plain number was
    written. A side whose value would be too large is equal to nothing but its own spelling.
    """
    if gold == answer:
        return True
    try:
        exact_gold, exact_answer = exact(gold), exact(answer)
        if exact_gold is not None and exact_answer is not None:
            if exact_gold == exact_answer:
                return True
            return any(d and rounds_to(d, v) for d, v in ((g, exact_answer), (a, exact_gold)))
        if symbols(gold) != symbols(answer) and not (symbols(gold) and symbols(answer)):
            return False
        with precision():
            return any(_agree(gold, answer, natural_log, g, a) for natural_log in (True, False))
    except (TooLarge, ZeroDivisionError, OverflowError):
        return False


def _agree(gold: Node, answer: Node, natural_log: bool, g: Decimal | None, a: Decimal | None) -> bool:
    names = sorted(symbols(gold) | symbols(answer))
    counting, positive = bool(names) and _counts(gold), _takes_roots(gold)
    num_compared = 0
    for index in range((_NUM_INTEGER_POINTS if counting else _NUM_POINTS) if names else 1):
        point = integer_point(names, index) if counting else sample_point(names, index, positive)
        try:
            x, y = evaluate(gold, point, natural_log), evaluate(answer, point, natural_log)
        except (ZeroDivisionError, ValueError):
            continue  # outside of what one of them is defined on
        if not (mpmath.isfinite(x) and mpmath.isfinite(y)):
            continue
        num_compared += 1
        if abs(x - y) > _SAME * max(abs(x), abs(y)) and not _vanishes(gold, answer, point, natural_log, abs(x - y)):
            decimal, value = (g, y) if g else (a, x)
            return bool(not names and decimal and mpmath.im(value) == 0 and rounds_to(decimal, mpmath.re(value)))
    return num_compared > 0


def _vanishes(gold: Node, answer: Node, point: dict[str, Any], natural_log: bool, difference: Any) -> bool:
    """Whether a small difference is only what rounding left (of sin(pi), say): with more digits it shrinks."""
    if difference > _SMALL:
        return False
    with precision(2):
        finer = abs(evaluate(gold, point, natural_log) - evaluate(answer, point, natural_log))
        return bool(finer < difference * _SAME)


def _takes_roots(node: Node) -> bool:
    """Whether a gold has roots or logarithms of its symbols; then it means them to be positive."""
    if node.op in ("root", "log", "lg", "ln") and symbols(node):
        return True
    if node.op == "pow" and symbols(node.args[0]) and node.args[1].op == "div":
        return True
    return any(_takes_roots(child) for child in node.args if isinstance(child, Node))


def _counts(node: Node) -> bool:
    """Whether a tree is about whole numbers, as factorials, binomials and floors are."""
    counting = node.op in ("fact", "fact2", "choose", "floor", "ceil")
    return counting or any(_counts(child) for child in node.args if isinstance(child, Node))


def integer_point(names: list[str], index: int) -> dict[str, Any]:
    """Whole numbers for symbols, odd and even, in rising and in falling order of the names."""
    order = names if index % 2 else names[::-1]
    return {name: mpmath.mpf(3 + index + (5 + index) * k) for k, name in enumerate(order)}


def sample_point(names: list[str], index: int, positive: bool = False) -> dict[str, Any]:
    """Irregular values, the same in every run; unless `positive`, every second point has negative ones too."""
    point = {}
    for k, name in enumerate(names):
        value = mpmath.mpf(17 + 29 * ((k * 7 + index * 11) % 31)) / 313 + mpmath.mpf(k + index + 1) / 101
        point[name] = -value if not positive and index % 2 and (k + index // 2) % 2 == 0 else value
    return point
