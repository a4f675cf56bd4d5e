r"""Whether two single values are equal: exactly where they are rational, to 40 digits where they are not.

Policy of rounding: a decimal equals an exact value where it is that value rounded to the places written, and at least
ROUNDED_DIGITS significant digits are written. 0.333333 is 1/3; 0.33 is not.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import mpmath

from d3s_megatron.rewards import expression
from d3s_megatron.rewards.clean import squeeze
from d3s_megatron.rewards.expression import Node, TooLarge, Unreadable, evaluate, exact, read_expression, symbols
from d3s_megatron.rewards.library import can_try, library_equal, library_reads
from d3s_megatron.rewards.numbers import Decimal, read_number
from d3s_megatron.rewards.units import Quantity, take_off_unit, units_conflict

ROUNDED_DIGITS = 6
_SAME = mpmath.mpf(10) ** -40  # relative; values are worked out to 60 digits
_NUM_POINTS = 4
_NUM_INTEGER_POINTS = 8

_BASED = re.compile(
    r"(?=[^_]*\d)(?P<digits>-?[0-9A-Za-z,. ]+?)\s*_\s*(?:\{\s*(?:\\text\{|\()?\s*(?P<a>-?\w+)\s*[)}]?\s*\}|(?P<b>\d+))"
)
_CHOICE = re.compile(r"\(?([A-J])\)?")
_CHOICE_AND_TEXT = re.compile(r"\(?([A-J])(?:\)|:|\.\s|\)\s*:)\s*\S.*")


def same_value(gold: str, answer: str) -> bool:
    """Whether two cleaned texts of one value each are equal."""
    if squeeze(gold) == squeeze(answer):
        return True
    gold, answer = _plain(gold), _plain(answer)
    if squeeze(gold) == squeeze(answer):
        return True
    if _BASED.fullmatch(gold) or _BASED.fullmatch(answer):
        return _same_in_base(gold, answer)
    return _same_quantity(take_off_unit(gold), take_off_unit(answer))


def is_readable(text: str) -> bool:
    """Whether one value is understood, and not only compared by its spelling."""
    text = _plain(text)
    body = take_off_unit(text).body
    if re.fullmatch(r"\s*[-+]?\s*\\(?:infty|emptyset)\s*", body) or _BASED.fullmatch(text) or read_number(body):
        return True
    if re.fullmatch(r"[-+]?\d{2001,}", body):
        return True  # too many digits to be worked with, and plain enough to be compared by them
    try:
        _tree(body)
    except Unreadable:
        return library_reads(body)
    return True


def _plain(text: str) -> str:
    """Upright numbers and letters made plain, without a plus in front."""
    text = text.removeprefix("+")
    return re.sub(r"\\text\{\s*(\(?[-+]?[\d.,]+\)?|\(?[A-J]\)?)\s*\}", r" \1 ", text).strip()


def choice_of(text: str) -> str | None:
    """The letter of a multiple choice, alone, in brackets, or before the text of the option."""
    text = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text).strip()
    match = _CHOICE.fullmatch(text) or _CHOICE_AND_TEXT.fullmatch(text)
    return match.group(1) if match else None


def _same_in_base(gold: str, answer: str) -> bool:
    """Digits and base as they are written; only the answer may leave the base out."""
    g, a = _BASED.fullmatch(gold), _BASED.fullmatch(answer)
    if g is None:
        return False
    digits = a["digits"] if a else answer
    if a and (a["a"] or a["b"]) != (g["a"] or g["b"]):
        return False
    return re.sub(r"[, ]", "", digits).lower() == re.sub(r"[, ]", "", g["digits"]).lower()


def _same_quantity(gold: Quantity, answer: Quantity) -> bool:
    if gold.guess and answer.unit != gold.unit:  # in a gold "6m" the m is a symbol
        gold = Quantity(gold.body + " " + (gold.unit[0][0] if gold.unit else ""))
    if units_conflict(gold, answer):
        return False
    if _same_body(gold.body, answer.body):
        return not (answer.guess and gold.unit is None and not read_number(gold.body))
    if gold.percent != answer.percent:
        with_sign, other = (gold, answer) if gold.percent else (answer, gold)
        number = read_number(with_sign.body)
        hundredth = number and Decimal(number.value / 100, number.step / 100, number.num_digits)
        if hundredth and (plain := read_number(other.body)) and _same_number(hundredth, plain):
            return True
    if gold.degree != answer.degree and r"\pi" in gold.body + answer.body:
        turned, radians = (gold, answer) if gold.degree else (answer, gold)
        return _same_body(rf"\frac{{\pi}}{{180}}\cdot({turned.body})", radians.body)
    return False


def _same_body(gold: str, answer: str) -> bool:
    if squeeze(gold) == squeeze(answer):
        return True
    g, a = read_number(gold), read_number(answer)
    if g and a:
        return _same_number(g, a)
    try:
        return same_expression(_tree(gold), _tree(answer), g, a)
    except Unreadable:
        return (can_try(gold) or can_try(answer)) and library_equal(gold, answer)


def _tree(text: str) -> Node:
    if number := read_number(text):
        return Node("num", (number.value,))
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)  # 100,000\pi; the commas of lists are gone before
    return read_expression(_degrees_to_radians(text))


def _degrees_to_radians(text: str) -> str:
    if not re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", text):
        return text.replace(r"^\circ", "")
    return re.sub(r"(\d+(?:\.\d+)?)\s*\^\\circ", r"(\1\\cdot\\frac{\\pi}{180})", text)


def _same_number(gold: Decimal, answer: Decimal) -> bool:
    return gold.value == answer.value or _rounds_to(gold, answer.value) or _rounds_to(answer, gold.value)


def _rounds_to(decimal: Decimal, value: Any) -> bool:
    """Whether `decimal` is `value` rounded to the places it shows, and shows enough of them."""
    if not decimal.step or decimal.num_digits < ROUNDED_DIGITS:
        return False
    if isinstance(value, Fraction):
        return abs(decimal.value - value) * 2 <= decimal.step
    written = mpmath.mpf(decimal.value.numerator) / decimal.value.denominator
    step = mpmath.mpf(decimal.step.numerator) / decimal.step.denominator
    return bool(abs(written - value) * 2 <= step)


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
            return any(d and _rounds_to(d, v) for d, v in ((g, exact_answer), (a, exact_gold)))
        if symbols(gold) != symbols(answer) and not (symbols(gold) and symbols(answer)):
            return False
        with expression.precision():
            return any(_agree(gold, answer, natural_log, g, a) for natural_log in (True, False))
    except (TooLarge, ZeroDivisionError, OverflowError):
        return False


def _agree(gold: Node, answer: Node, natural_log: bool, g: Decimal | None, a: Decimal | None) -> bool:
    names = sorted(symbols(gold) | symbols(answer))
    counting = bool(names) and _counts(gold)
    num_compared = 0
    for index in range((_NUM_INTEGER_POINTS if counting else _NUM_POINTS) if names else 1):
        point = integer_point(names, index) if counting else sample_point(names, index)
        try:
            x, y = evaluate(gold, point, natural_log), evaluate(answer, point, natural_log)
        except (ZeroDivisionError, ValueError):
            continue  # outside of what one of them is defined on
        if not (mpmath.isfinite(x) and mpmath.isfinite(y)):
            continue
        if names and not counting and index % 2 and mpmath.im(x) != 0 and not _has_i(gold):
            continue  # the gold means positive symbols, under a root or a logarithm
        num_compared += 1
        if abs(x - y) > _SAME * max(abs(x), abs(y)):
            decimal, value = (g, y) if g else (a, x)
            return bool(not names and decimal and mpmath.im(value) == 0 and _rounds_to(decimal, mpmath.re(value)))
    return num_compared > 0


def _has_i(node: Node) -> bool:
    return node.op == "i" or any(_has_i(child) for child in node.args if isinstance(child, Node))


def _counts(node: Node) -> bool:
    """Whether a tree is about whole numbers, as factorials, binomials and floors are."""
    counting = node.op in ("fact", "choose", "floor", "ceil")
    return counting or any(_counts(child) for child in node.args if isinstance(child, Node))


def integer_point(names: list[str], index: int) -> dict[str, Any]:
    """Whole numbers for symbols, odd and even, in rising and in falling order of the names."""
    order = names if index % 2 else names[::-1]
    return {name: mpmath.mpf(3 + index + (5 + index) * k) for k, name in enumerate(order)}


def sample_point(names: list[str], index: int) -> dict[str, Any]:
    """Irregular values for symbols, the same in every run; every second point has negative ones among them."""
    point = {}
    for k, name in enumerate(names):
        value = mpmath.mpf(17 + 29 * ((k * 7 + index * 11) % 31)) / 313 + mpmath.mpf(k + index + 1) / 101
        point[name] = -value if index % 2 and (k + index // 2) % 2 == 0 else value
    return point
