r"""math-verify's own reading, for what `expression.py` leaves to it: sums, products, integrals and limits.

Only such texts come here: the library's grammar is slow on nested brackets and its comparison may run for ever (a
worker is then killed), so it gets short texts without numbers that could grow.
"""

from __future__ import annotations

import logging
import re

MAX_LENGTH = 200
_KNOWN_THERE = re.compile(r"\\(?:sum|prod|int|lim)(?![a-zA-Z])")
_COULD_GROW = re.compile(r"\d{5,}|\^\s*\{[^{}]*\^|!|\\binom|[(\[{]{4}")

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at every call that its own timeout is off


def can_try(text: str) -> bool:
    """Whether a cleaned text is one the library is asked about."""
    return bool(_KNOWN_THERE.search(text)) and can_be_read(text)


def can_be_read(text: str) -> bool:
    """Whether a cleaned text is safe to hand to the library."""
    return len(text) <= MAX_LENGTH and not _COULD_GROW.search(text)


def library_equal(gold: str, answer: str) -> bool:
    """The library's verdict on two cleaned texts; what it cannot read is not equal."""
    from math_verify import verify  # here, so that importing this package stays light

    expressions = [_parse(text) for text in (gold, answer)]
    return None not in expressions and bool(verify(expressions[0], expressions[1], timeout_seconds=None))


def library_reads(text: str) -> bool:
    """Whether the library can read a cleaned text."""
    return can_try(text) and _parse(text) is not None


def _parse(text: str) -> object | None:
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy

    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", text)  # its grammar wants the braces
    try:
        return latex2sympy(
            text, is_real=True, normalization_config=None, conversion_config=ConversionConfig(lowercase_symbols=False)
        )
    except Exception:  # its grammar raises bare Exception for a syntax error: the text is not one it can read
        return None
