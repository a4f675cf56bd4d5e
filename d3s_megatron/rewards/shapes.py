"""The shapes of an answer: words, list, pair, set, interval, union, relation, matrix, ratio, or one value.

Values stay text here; `structure.py` reads shapes, `equal.py` compares them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Value:
    """One expression."""

    text: str


@dataclass(frozen=True)
class Words:
    """An answer in words."""

    text: str


@dataclass(frozen=True)
class Items:
    """Several answers: `kind` is list (no brackets), set, tuple (round or angled), or bracket (square)."""

    kind: str
    items: tuple[Shape, ...]


@dataclass(frozen=True)
class Interval:
    """An interval; of two ends in round brackets nobody can say whether it is a pair: that is a tuple."""

    low: Shape
    high: Shape
    closed: tuple[bool, bool]


@dataclass(frozen=True)
class Union:
    """Sets joined by \\cup."""

    parts: tuple[Shape, ...]


@dataclass(frozen=True)
class Relation:
    """sides[0] ops[0] sides[1] ops[1] ...; ops are = < > <= >= !=."""

    sides: tuple[Shape, ...]
    ops: tuple[str, ...]


@dataclass(frozen=True)
class Matrix:
    """Rows of values; `bars` where vertical lines make it a determinant."""

    rows: tuple[tuple[Shape, ...], ...]
    bars: bool = False


@dataclass(frozen=True)
class Ratio:
    """a : b : c, also the time of a clock."""

    parts: tuple[Shape, ...]


Shape = Value | Words | Items | Interval | Union | Relation | Matrix | Ratio


def children(shape: Shape) -> tuple[Shape, ...]:
    """The parts of a shape."""
    if isinstance(shape, Items):
        return shape.items
    if isinstance(shape, Union | Ratio):
        return shape.parts
    if isinstance(shape, Interval):
        return shape.low, shape.high
    if isinstance(shape, Relation):
        return shape.sides
    if isinstance(shape, Matrix):
        return tuple(cell for row in shape.rows for cell in row)
    return ()


class TooDeep(ValueError):
    """The brackets are nested too deeply, or there are too many items."""
