"""Numbers as people write them, read exactly.

Policy of rounding: a decimal equals an exact value where it is that value rounded to the places written, and at least
ROUNDED_DIGITS significant digits are written. 0.333333 is 1/3; 0.33 is not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import mpmath

from d3s_megatron.rewards.expression import MAX_DIGITS

MAX_POWER_OF_TEN = 5000
ROUNDED_DIGITS = 6

_UNSIGNED = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)?(?:\.\d*)?"
_DECIMAL = re.compile(
    rf"(?P<digits>{_UNSIGNED})(?:[eE](?P<e>[+-]?\d+)"
    r"|\s*(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*(?:\{\s*(?P<power>[+-]?\s*\d+)\s*\}|(?P<bare>-?\d+)))?"
)
_POWER_OF_TEN = re.compile(r"10\s*\^\s*(?:\{\s*(?P<power>[+-]?\s*\d+)\s*\}|(?P<bare>\d+))")
_FRACTION = re.compile(
    r"(?:(?P<whole>\d+)\s*(?=\\frac)|(?P<whole2>\d+)\s+(?=\d+\s*/))?"
    r"(?:\\frac\s*(?:\{\s*(?P<n1>-?\d+)\s*\}|(?P<n2>\d)|\s(?P<n3>\d))\s*(?:\{\s*(?P<d1>-?\d+)\s*\}|(?P<d2>\d))"
    r"|(?P<n4>\d+\.?)\s*/\s*(?P<d4>\d+\.?))"
)
_REPEATING = re.compile(r"(?P<whole>\d*)\.(?P<once>\d*)\\(?:overline|bar|dot)\s*\{\s*(?P<again>\d+)\s*\}")
_SIGN = re.compile(r"\s*([+-]?)\s*")


@dataclass(frozen=True)
class Decimal:
    """A number and how finely it was written: `step` is one unit of its last written place, 0 for an exact form."""

    value: Fraction
    step: Fraction = Fraction(0)
    num_digits: int = 0  # significant ones


def read_number(text: str) -> Decimal | None:
    """The number a cleaned text writes out: integer, decimal, scientific notation, fraction or mixed number."""
    sign, rest = _split_sign(text.strip())
    if not rest or len(rest) > MAX_DIGITS:
        return None
    match = _DECIMAL.fullmatch(rest)
    if match and any(c.isdigit() for c in match["digits"]):
        return _decimal(sign, match)
    if match := _POWER_OF_TEN.fullmatch(rest):
        power = int((match["power"] or match["bare"]).replace(" ", ""))
        return Decimal(sign * Fraction(10) ** power) if abs(power) <= MAX_POWER_OF_TEN else None
    if match := _REPEATING.fullmatch(rest):
        once, again = match["once"], match["again"]
        period = Fraction(int(again), (10 ** len(again) - 1) * 10 ** len(once))
        return Decimal(sign * (Fraction(int((match["whole"] + once) or "0"), 10 ** len(once)) + period))
    if match := _FRACTION.fullmatch(rest):
        return _fraction(sign, match)
    return None


def _split_sign(text: str) -> tuple[int, str]:
    match = _SIGN.match(text)
    assert match is not None
    return (-1 if match.group(1) == "-" else 1), text[match.end() :]


def _decimal(sign: int, match: re.Match[str]) -> Decimal | None:
    digits = match["digits"].replace(",", "").replace(" ", "")
    power = int((match["e"] or match["power"] or match["bare"] or "0").replace(" ", ""))
    if abs(power) > MAX_POWER_OF_TEN:
        return None
    whole, _, decimals = digits.partition(".")
    scale = Fraction(10) ** power
    value = sign * Fraction(int((whole + decimals) or "0"), 10 ** len(decimals)) * scale
    if "." not in digits and not power:
        return Decimal(value)
    num_digits = len((whole + decimals).lstrip("0"))
    return Decimal(value, Fraction(1, 10 ** len(decimals)) * scale, num_digits)


def _fraction(sign: int, match: re.Match[str]) -> Decimal | None:
    numerator = int((match["n1"] or match["n2"] or match["n3"] or match["n4"]).rstrip("."))
    denominator = int((match["d1"] or match["d2"] or match["d4"]).rstrip("."))
    whole = match["whole"] or match["whole2"]
    if denominator == 0 or (whole is not None and not 0 <= numerator < denominator):
        return None  # `3 8/5` is no mixed number
    return Decimal(sign * (int(whole or 0) + Fraction(numerator, denominator)))


def rounds_to(decimal: Decimal, value: Any) -> bool:
    """Whether `decimal` is `value` rounded to the places it shows, and shows enough of them."""
    if not decimal.step or decimal.num_digits < ROUNDED_DIGITS:
        return False
    if isinstance(value, Fraction):
        return abs(decimal.value - value) * 2 <= decimal.step
    written = mpmath.mpf(decimal.value.numerator) / decimal.value.denominator
    step = mpmath.mpf(decimal.step.numerator) / decimal.step.denominator
    return bool(abs(written - value) * 2 <= step)
