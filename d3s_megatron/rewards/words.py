"""Answers in words."""

from __future__ import annotations

import re

_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_ONLY_WORDS = re.compile(r"[^\W\d_]+(?:[\s,.'\"!?()-]+[^\W\d_]+)*[.!?]?")
_SHORT_WORDS = {"yes", "no", "odd", "even", "all", "any", "none", "true", "false", "and", "not", "one", "two",
                "six", "ten", "red", "day", "sum", "max", "min", "mon", "tue", "wed", "thu", "fri", "sat",
                "sun", "dne"}  # fmt: skip


def words_of(text: str) -> str | None:
    """The words of an answer that is words and no mathematics; their case, marks and brackets do not matter."""
    if not _TEXT.search(text):
        longest = max((len(word) for word in re.findall(r"[^\W\d_]+", text)), default=0)
        is_word = longest >= 4 or text.strip().casefold() in _SHORT_WORDS
        if not is_word or "\\" in text or not _ONLY_WORDS.fullmatch(text.strip()):
            return None
        return fold(text)
    outside = _TEXT.sub(" ", text)
    inside = " ".join(_TEXT.findall(text))
    if re.search(r"[0-9=<>^_\\+*/|{}]", outside) or re.search(r"[a-zA-Z]", outside):
        return None
    if re.fullmatch(r"[\s\d.,:()+\-*/=%$]*", inside):  # \text{12}: numbers in an upright face
        return None
    return fold(inside if not outside.strip(" ,.()") else text)


def fold(words: str) -> str:
    """Words without case and marks."""
    return " ".join(re.findall(r"[^\W_]+", words.casefold()))
