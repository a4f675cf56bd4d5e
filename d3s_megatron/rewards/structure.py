r"""Reads the shape of an answer: where its brackets, commas and relations are."""

from __future__ import annotations

import re

from d3s_megatron.rewards.shapes import Interval, Items, Matrix, Ratio, Relation, Shape, TooDeep, Union, Value, Words
from d3s_megatron.rewards.words import words_of

MAX_DEPTH = 12  # of brackets inside brackets
MAX_ITEMS = 500

_OPENING = {
    "(": ")",
    "[": "]",
    "{": "}",
    r"\{": r"\}",
    r"\langle": r"\rangle",
    r"\lfloor": r"\rfloor",
    r"\lceil": r"\rceil",
}
_CLOSING = set(_OPENING.values())
_PIECE = re.compile(r"\\begin\{[a-zA-Z]*\*?\}|\\end\{[a-zA-Z]*\*?\}|\\[a-zA-Z]+|\\.|.", re.DOTALL)
_RELATIONS = {
    "=": "=",
    "<": "<",
    ">": ">",
    r"\le": "<=",
    r"\ge": ">=",
    r"\ne": "!=",
    r"\approx": "=",
    r"\equiv": "==",
    r"\in": "in",
}
_THOUSANDS = re.compile(r"\s*(?:\\\$)?\s*[+-]?\s*\d{1,3}(?:,\d{3})+(?:\.\d+)?(?!\d)[^,]*")
_SYSTEM = re.compile(r"(?:\\\{)?\s*\\begin\{(cases|aligned|align\*?|gathered)\}(.*)\\end\{\1\}", re.DOTALL)
_MATRIX = re.compile(r"\\begin\{([pbvBV]?matrix|array)\}(?:\{[^{}]*\})?(.*)\\end\{\1\}", re.DOTALL)


def read_shape(text: str) -> Shape:
    """The shape of a cleaned text.

    Raises:
        TooDeep: it is not worth reading.
    """
    return _read(_pieces(text), 0)


def _pieces(text: str) -> list[str]:
    return _PIECE.findall(text)


def _read(pieces: list[str], level: int) -> Shape:
    if level > MAX_DEPTH:
        raise TooDeep("nested too deeply")
    pieces = _strip(pieces)
    text = "".join(pieces)
    if (words := words_of(text)) is not None:
        return Words(words)
    depths = _depths(pieces)

    if level == 0 and _THOUSANDS.fullmatch(text) and not re.search(r"[=<>]|\\(?:le|ge|in|cup)\b", text):
        return Value(text)
    if len(parts := _split(pieces, depths, {",", ";"})) > 1:
        return _list(parts, level)
    if len(parts := _split(pieces, depths, {r"\cup"})) > 1:
        return Union(tuple(_read(part, level + 1) for part in parts))
    pieces, depths = _before_approximation(pieces, depths)
    text = "".join(pieces)
    ops = [_RELATIONS[p] for p, depth in zip(pieces, depths, strict=True) if depth == 0 and p in _RELATIONS]
    if ops:
        sides = _split(pieces, depths, set(_RELATIONS))
        if ops[0] == "in" and len(ops) == 1:
            return Relation((_read(sides[0], level + 1), _read(sides[1], level + 1)), ("=",))
        if all(_strip(side) for side in sides) and "in" not in ops and "==" not in ops:
            return Relation(tuple(_read(side, level + 1) for side in sides), tuple(ops))
        return Value(text)
    if (inner := _bracketed(pieces, depths)) is not None:
        return _bracket(pieces[0], pieces[-1], inner, level)
    signs = [p for p, depth in zip(pieces, depths, strict=True) if p in (r"\pm", r"\mp")]
    if signs:
        plus = ["+" if p == r"\pm" else "-" if p == r"\mp" else p for p in pieces]
        minus = ["-" if p == r"\pm" else "+" if p == r"\mp" else p for p in pieces]
        return Items("list", (_read(plus, level + 1), _read(minus, level + 1)))
    if (match := _SYSTEM.fullmatch(text)) and not (match.group(1) == "cases" and "&" in text):
        rows = [row.replace("&", " ") for row in re.split(r"\\\\", match.group(2)) if row.strip()]
        return _list([_pieces(row) for row in rows], level)
    if match := _MATRIX.fullmatch(text):
        rows = [row for row in re.split(r"\\\\", match.group(2)) if row.strip() and row.strip() != r"\hline"]
        cells = tuple(tuple(_read(_pieces(cell), level + 1) for cell in row.split("&")) for row in rows)
        return Matrix(cells, match.group(1) in ("vmatrix", "Vmatrix"))
    if len(parts := _split(pieces, depths, {":"})) > 1 and all(_strip(part) for part in parts):
        return Ratio(tuple(_read(part, level + 1) for part in parts))
    return Value(text)


def _before_approximation(pieces: list[str], depths: list[int]) -> tuple[list[str], list[int]]:
    """`1/3 \\approx 0.33` says 1/3; `x \\approx 0.33` says x = 0.33."""
    for position, (piece, depth) in enumerate(zip(pieces, depths, strict=True)):
        if (
            piece == r"\approx"
            and depth == 0
            and any(character.isdigit() for p in pieces[:position] for character in p)
        ):
            return _strip(pieces[:position]), _depths(_strip(pieces[:position]))
    return pieces, depths


def _strip(pieces: list[str]) -> list[str]:
    start, end = 0, len(pieces)
    while start < end and pieces[start].isspace():
        start += 1
    while end > start and pieces[end - 1].isspace():
        end -= 1
    return pieces[start:end]


def _depths(pieces: list[str]) -> list[int]:
    """How many brackets each piece is inside of (an opening and its closing one count as outside)."""
    depth, depths, bars = 0, [], 0
    for piece in pieces:
        if piece in _OPENING or piece.startswith(r"\begin"):
            depths.append(depth)
            depth += 1
        elif piece in _CLOSING or piece.startswith(r"\end"):
            depth = max(0, depth - 1)
            depths.append(depth)
        else:
            depths.append(depth)
            bars += piece == "|"
    return depths


def _split(pieces: list[str], depths: list[int], separators: set[str]) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for piece, depth in zip(pieces, depths, strict=True):
        if depth == 0 and piece in separators:
            parts.append([])
        else:
            parts[-1].append(piece)
    return parts


def _list(parts: list[list[str]], level: int) -> Shape:
    parts = [part for part in parts if _strip(part)]
    if len(parts) > MAX_ITEMS:
        raise TooDeep("too many items")
    if len(parts) == 1:
        return _read(parts[0], level + 1)
    items: list[Shape] = []
    for item in _name_every([_read(part, level + 1) for part in parts]):
        items += item.items if isinstance(item, Items) and item.kind == "list" else [item]
    return Items("list", tuple(items))


def _name_every(items: list[Shape]) -> list[Shape]:
    """`x = 3, 4` names both values."""
    first = items[0]
    if not (isinstance(first, Relation) and first.ops == ("=",)) or any(isinstance(i, Relation) for i in items[1:]):
        return items
    return [first, *(Relation((first.sides[0], item), ("=",)) for item in items[1:])]


def _bracketed(pieces: list[str], depths: list[int]) -> list[str] | None:
    """What is inside, where the first piece's bracket is closed by the last piece."""
    if len(pieces) < 2 or any(depth == 0 for depth in depths[1:-1]):
        return None
    opening, closing = pieces[0], pieces[-1]
    if (
        opening in ("(", "[")
        and closing in (")", "]")
        or _OPENING.get(opening) == closing
        and opening in (r"\{", r"\langle")
    ):
        return pieces[1:-1]
    return None


def _bracket(opening: str, closing: str, inner: list[str], level: int) -> Shape:
    parts = [part for part in _split(inner, _depths(inner), {",", ";"}) if _strip(part)]
    if len(parts) > MAX_ITEMS:
        raise TooDeep("too many items")
    items = tuple(_read(part, level + 1) for part in parts)
    if opening == r"\{":
        if (condition := _condition(inner)) is not None:
            return _read(condition, level + 1)
        flat: list[Shape] = []
        for item in items:  # \{1 \pm \sqrt5, 2\}
            flat += item.items if isinstance(item, Items) and item.kind == "list" else [item]
        return Items("set", tuple(flat))
    if len(items) == 2 and (opening, closing) != ("(", ")") and opening != r"\langle":
        return Interval(items[0], items[1], (opening == "[", closing == "]"))
    if len(items) == 1:
        if opening == closing or _OPENING[opening] != closing:
            return Value("".join([opening, *inner, closing]))
        return items[0]
    return Items("bracket" if opening == "[" else "tuple", items)


def _condition(inner: list[str]) -> list[str] | None:
    r"""What a set like \{x | 2 < x < 3\} asks of its one symbol."""
    for position, piece in enumerate(inner):
        if piece in ("|", ":"):
            before = "".join(inner[:position])
            return inner[position + 1 :] if re.fullmatch(r"\s*[a-z]\s*(?:\\in\s*\S+\s*)?", before) else None
    return None
