r"""Which part of an answer text is the answer.

1. A thinking part does not count: what follows the last `</think>`, or what stands before a `<think>` left open.
2. The last box that is balanced and not empty: `\boxed{...}`, `\fbox{...}`, or `\boxed` and one bare token. Boxes that
   follow one another with nothing but a comma, "and", "or" between them are one list, so hedging does not pay.
3. Without a box: the last line, where it says "final answer: ..." or "#### ...". No other number in the text counts.
"""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BARE_TOKEN = re.compile(r"[+-]?\d+(?:\.\d+)?|[a-zA-Z]|\\(?!boxed|fbox)[a-zA-Z]+")
_JOINT = re.compile(r"(?:[\s$]|\\[()\]\[])*(?:,|;|\band\b|\bor\b|,\s*and\b|,\s*or\b)(?:[\s$]|\\[()\]\[])*")
_FINAL_LINE = re.compile(r"(?:(?:the\s+)?final\s+answer(?:\s+is)?\s*[:=]?|####)\s*(.+)", re.IGNORECASE)


def final_answer(text: str) -> str | None:
    """The answer inside an answer text, or None; linear in its length."""
    text = _after_thinking(text)
    boxes = _boxes(text)
    if boxes:
        return _join(text, boxes)
    lines = text.strip().rsplit("\n", 1)
    match = _FINAL_LINE.fullmatch(lines[-1].replace("**", " ").strip())
    answer = match.group(1).strip().rstrip(".") if match else ""
    return answer or None


def _after_thinking(text: str) -> str:
    text = text.rpartition("</think>")[2]
    return text.partition("<think>")[0] if "<think>" in text else text


def _boxes(text: str) -> list[tuple[int, int, str]]:
    """(start, end, content) of every balanced, non-empty box that is not inside another, in order."""
    ends = _closing_braces(text)
    boxes = []
    position = 0
    while match := _BOX.search(text, position):
        start, inside = match.span()
        if inside < len(text) and text[inside] == "{":
            end = ends.get(inside)
            if end is None:  # never closed: a box inside it may still be
                position = inside + 1
                continue
            content, position = text[inside + 1 : end], end + 1
        else:
            token = _BARE_TOKEN.match(text, inside)
            content, position = (token.group(), token.end()) if token else ("", inside)
        if content.strip():
            boxes.append((start, position, content.strip()))
    return boxes


def _closing_braces(text: str) -> dict[int, int]:
    """Position of the closing brace of every opening brace that has one; escaped braces are characters."""
    ends: dict[int, int] = {}
    opened: list[int] = []
    for match in _BRACE.finditer(text):
        if match.group() == "{":
            opened.append(match.start())
        elif match.group() == "}" and opened:
            ends[opened.pop()] = match.start()
    return ends


def _join(text: str, boxes: list[tuple[int, int, str]]) -> str:
    parts = [boxes[-1][2]]
    for (_, end, content), (start, _, _) in zip(reversed(boxes[:-1]), reversed(boxes[1:]), strict=True):
        if start - end > 40 or not _JOINT.fullmatch(text, end, start):
            break
        if content not in parts:
            parts.append(content)
    return ", ".join(reversed(parts))
