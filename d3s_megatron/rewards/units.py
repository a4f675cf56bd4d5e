r"""Signs around a number that name what is counted: units, degrees, percent, money.

Policy: a unit that one side leaves out is forgiven. Where both write a known measure, the measures must be the same
one ("3 hours" is not "3 minutes"); nothing is converted. Words that are no measure ("apples") are not compared.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_MEASURES = {
    "nm": "nanometer nanometre", "mm": "millimeter millimetre", "cm": "centimeter centimetre", "m": "meter metre",
    "km": "kilometer kilometre", "in": "inch inche", "ft": "foot feet", "yd": "yard", "mi": "mile",
    "s": "second sec", "ms": "millisecond", "min": "minute", "h": "hour hr", "day": "d", "week": "wk",
    "month": "", "year": "yr", "mg": "milligram", "g": "gram gm", "kg": "kilogram", "lb": "pound", "oz": "ounce",
    "ton": "tonne", "l": "liter litre L", "ml": "milliliter millilitre mL", "gal": "gallon", "cup": "", "mph": "",
    "kmh": "kph", "rad": "radian", "degree": "deg", "$": "dollar usd USD", "cent": "¢", "€": "euro EUR", "£": "GBP",
    "hz": "hertz Hz", "n": "newton N", "j": "joule J", "w": "watt W", "k": "kelvin K", "pa": "pascal Pa", "v": "volt V",
    "mol": "mole", "acre": "", "am": "a.m", "pm": "p.m", "unit": "", "erg": "", "ev": "eV", "ohm": "", "dozen": "",
}  # fmt: skip
_NAMES = {name: measure for measure, names in _MEASURES.items() for name in [measure, *names.split()]}
_ONE_LETTER = {"m", "s", "h", "g", "l", "L"}  # after a number these may be units; elsewhere they are symbols
_TELLING = {"cm", "mm", "km", "kg", "ft", "lb", "yd", "oz", "hr", "¢", "€", "£"}
_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}

# Every repetition starts with a character that the one before cannot end with, so matching takes linear time.
_TEXT_UNIT = re.compile(r"((?:\\text\{[^{}]*\}(?:\s*\^\s*(?:\{\s*-?\d\s*\}|\d))?[\s/.]*(?:\\cdot\s*)?)+)$")
_BARE_UNIT = re.compile(r"(?<=[\d}\s)])((?:[a-zA-Z¢€£.]+[\s/]+)*[a-zA-Z¢€£.]+(?:\s*\^\s*(?:\{\s*\d\s*\}|\d))?)$")
# "5 (or 6)", "5 if x > 0": such words say more than a unit does
_NO_UNIT = re.compile(r"\\text\{[^{}]*(?:(?<!\^)(?<!\^-)\d|\b(?:or|and|not|if|when|unless|except)\b)", re.IGNORECASE)
_LONGEST_UNIT = 60  # characters
_MONEY = re.compile(r"\s*([+-]?)\s*(\\\$|€|£|¥|USD|US\\\$)\s*([+-]?)")
_PERCENT = re.compile(r"\s*(?:%|\\text\{\s*(?:%|percent)\s*\}|percent(?:age)?|pct)\s*$", re.IGNORECASE)
_DEGREE = re.compile(r"\s*\^\\circ\s*([CFK]|\\text\{\s*[CFK]\s*\})?\s*$")
_ANGLE_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
_WORD = re.compile(r"([a-zA-Z¢€£$.]+)\s*(?:\^\s*\{?\s*(-?\d)\s*\}?)?")
_NUMBER_END = re.compile(r"[\d.)}]$|\\pi$")


@dataclass(frozen=True)
class Quantity:
    """A cleaned text with its signs taken off."""

    body: str
    unit: tuple[tuple[str, int], ...] | None = None  # known measures with their powers; None: no or unknown words
    percent: bool = False
    degree: bool = False
    guess: str = ""  # the whole text, where its unit may be a product of symbols instead


def take_off_unit(text: str) -> Quantity:
    """Split a cleaned text into what is counted with and the rest."""
    text = text.strip()
    if (match := _MONEY.match(text)) and not _MONEY.match(text, match.end()):
        sign = "-" if "-" in (match.group(1), match.group(3)) else ""
        rest = take_off_unit(sign + text[match.end() :])
        currency = {r"\$": "$", r"US\$": "$", "USD": "$"}.get(match.group(2), match.group(2))
        return Quantity(rest.body, rest.unit or ((currency, 1),), rest.percent)
    if (match := _PERCENT.search(text)) and match.start():
        return Quantity(text[: match.start()], percent=True)
    if (match := _DEGREE.search(text)) and match.start() and not _ANGLE_FUNCTION.search(text):
        return Quantity(text[: match.start()], degree=True)
    if text.endswith(r"\$"):
        return Quantity(text[:-2].strip(), (("$", 1),))
    match = _TEXT_UNIT.search(text)
    if match and _can_be_counted(text[: match.start()]) and not _NO_UNIT.search(match.group(1)):
        return _with_unit(text[: match.start()].strip(), re.sub(r"\\text\{([^{}]*)\}", r" \1 ", match.group(1)))
    return _take_off_bare_unit(text) or Quantity(text)


def _take_off_bare_unit(text: str) -> Quantity | None:
    """A unit without \\text: sure where it is a long or telling word behind a space, else only a guess (2mg, 6 m)."""
    match = _BARE_UNIT.search(text, max(0, len(text) - _LONGEST_UNIT))
    if not match or not _NUMBER_END.search(body := text[: match.start()].strip()):
        return None
    words, apart = match.group(1), text[match.start() - 1].isspace()
    unit = _read_unit(words)
    if unit is None:
        return None
    names = re.findall(r"[a-zA-Z¢€£]+", words)
    if apart and all(len(name) > 2 or name in _TELLING for name in names):
        return _with_unit(body, words)
    if words.strip() in _ONE_LETTER or apart and len(words.strip()) > 1:
        return Quantity(body, unit, guess=text)
    return None


def units_conflict(a: Quantity, b: Quantity) -> bool:
    """Whether both sides name known measures, degrees or percent, and these differ."""
    measures = [_measured_in(quantity) for quantity in (a, b)]
    return None not in measures and measures[0] != measures[1]


def _measured_in(quantity: Quantity) -> object | None:
    if quantity.percent:
        return "percent"
    if quantity.degree:
        return "degree"
    return None if quantity.guess else quantity.unit


def _can_be_counted(body: str) -> bool:
    body = body.strip()
    return (
        bool(body)
        and not re.search(r"[-+*/^_=<>,({\[]$|\\(?:cdot|times|in|le|ge|cup|cap)$", body)
        and r"\text" not in body
    )


def _with_unit(body: str, words: str) -> Quantity:
    unit = _read_unit(words)
    if unit == (("degree", 1),):
        return Quantity(body, degree=True)
    return Quantity(body, unit)


def _read_unit(words: str) -> tuple[tuple[str, int], ...] | None:
    """Measures with powers, or None where a word is no measure."""
    powers: dict[str, int] = {}
    factor, next_power = 1, 0
    tokens = re.split(r"(/|\bper\b)", words.replace("~", " ").replace(r"\cdot", " "))
    for token in tokens:
        if token in ("/", "per"):
            factor = -1
            continue
        for match in _WORD.finditer(token):
            word = match.group(1).strip(".")
            if word.lower() in _POWERS:
                if powers and word.lower() in ("squared", "cubed"):
                    last = next(reversed(powers))
                    powers[last] *= _POWERS[word.lower()]
                else:
                    next_power = _POWERS[word.lower()]
                continue
            measure = _measure(word)
            if measure is None:
                return None
            power = next_power or int(match.group(2) or 1)
            powers[measure] = powers.get(measure, 0) + factor * power
            next_power = 0
    return tuple(sorted(powers.items())) or None


def _measure(word: str) -> str | None:
    word = word.replace(".", "") if word.lower() in ("a.m", "p.m") else word
    for candidate in (word, word.lower(), word.lower().removesuffix("s"), word.lower().removesuffix("es")):
        if candidate in _NAMES:
            return _NAMES[candidate]
    return None
