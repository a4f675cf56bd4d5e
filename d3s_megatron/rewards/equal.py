"""Whether two answers are the same mathematics."""

from __future__ import annotations

import re

from math_verify import parse, verify


def is_parsable(gold: str) -> bool:
    """Whether a gold says anything that an answer can be compared with."""
    return bool(gold.strip())


def equal(gold: str, answer: str) -> bool:
    """Whether an answer equals the gold."""
    if re.sub(r"\s", "", gold) == re.sub(r"\s", "", answer):
        return True
    return verify(
        parse(f"${gold}$", parsing_timeout=None), parse(f"${answer}$", parsing_timeout=None), timeout_seconds=None
    )
