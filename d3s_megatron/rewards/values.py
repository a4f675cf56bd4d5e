r"""Whether two single values are equal: numbers, choices, quantities, numbers in a base, expressions."""

from __future__ import annotations

import re

from d3s_megatron.rewards.clean import squeeze
from d3s_megatron.rewards.expression import Node, read_expression
from d3s_megatron.rewards.identity import same_expression
from d3s_megatron.rewards.library import can_be_read, can_try, library_equal, library_reads
from d3s_megatron.rewards.numbers import Decimal, read_number, rounds_to
from d3s_megatron.rewards.tokens import Unreadable
from d3s_megatron.rewards.units import Quantity, take_off_unit, units_conflict

_BASED = re.compile(
    r"(?=[^_]*\d)(?P<digits>-?[0-9A-Za-z,. ]+?)\s*_\s*(?:\{\s*(?:\\text\{|\()?\s*(?P<a>-?\w+)\s*[)}]?\s*\}|(?P<b>\d+))"
)
_CHOICE = re.compile(r"\(?([A-J])\)?")
_OTHER_CHOICE = re.compile(r"\b[A-J]\b")  # after the first letter: a second choice is a hedge
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
    quantity = take_off_unit(text)
    body = quantity.guess or quantity.body
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
    match = _CHOICE.fullmatch(text) or (None if _OTHER_CHOICE.search(text, 2) else _CHOICE_AND_TEXT.fullmatch(text))
    return match.group(1) if match else None


def _same_in_base(gold: str, answer: str) -> bool:
    """Digits and base as they are written; only the answer may leave the base out, and base ten says nothing."""
    g, a = _BASED.fullmatch(gold), _BASED.fullmatch(answer)
    if g is None:
        assert a is not None
        return (a["a"] or a["b"]) == "10" and same_value(gold, a["digits"])
    if a and (a["a"] or a["b"]) != (g["a"] or g["b"]):
        return False
    digits = a["digits"] if a else answer
    return re.sub(r"[, ]", "", digits).lower() == re.sub(r"[, ]", "", g["digits"]).lower()


def _same_quantity(gold: Quantity, answer: Quantity) -> bool:
    if gold.guess and answer.unit != gold.unit:  # in a gold "6m" the m is a symbol
        gold = Quantity(gold.guess)
    if answer.guess and gold.unit is None and not read_number(gold.body):  # and so it is in the answer to a formula
        answer = Quantity(answer.guess)
    if units_conflict(gold, answer):
        return False
    if _same_body(gold.body, answer.body):
        return True
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
        # A sum that the gold writes out may be answered in other ways; a gold of 55 is not answered by naming a sum.
        return can_try(gold) and can_be_read(answer) and library_equal(gold, answer)


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
    if gold.step and answer.step:
        return gold.value == answer.value
    return gold.value == answer.value or rounds_to(gold, answer.value) or rounds_to(answer, gold.value)
