r"""Whether an answer is the same mathematics as the gold; the gold comes first, for the rules are not symmetric.

The policy for what can be argued about is in POLICY.md beside this file; every row of it is a test.
"""

from __future__ import annotations

import re
from functools import lru_cache

from d3s_megatron.rewards.clean import clean, squeeze
from d3s_megatron.rewards.relations import is_name, name_of, same_relation, spread
from d3s_megatron.rewards.shapes import (
    Interval,
    Items,
    Matrix,
    Ratio,
    Relation,
    Shape,
    TooDeep,
    Union,
    Value,
    Words,
    children,
)
from d3s_megatron.rewards.structure import read_shape
from d3s_megatron.rewards.values import choice_of, is_readable, same_value
from d3s_megatron.rewards.words import fold

MAX_LENGTH = 10_000  # characters of an answer that is looked at; longer ones are only compared as spelling
_INTEGER = re.compile(r"\s*-?[0-9]{1,18}\s*")  # most golds are; the full comparison says the same, later
_ALTERNATIVES = re.compile(r"\\text\s*\{\s*OR\s*\}")  # some data sets give a gold in several forms


def equal(gold: str, answer: str) -> bool:
    """Whether an answer (the inside of its box) equals a gold."""
    if not answer.strip() or not gold.strip():
        return False
    if gold.strip() == answer.strip():
        return True
    if _INTEGER.fullmatch(gold) and _INTEGER.fullmatch(answer):
        return int(gold) == int(answer)
    if len(answer) > MAX_LENGTH or len(gold) > MAX_LENGTH:
        return False
    if _ALTERNATIVES.search(gold):
        return any(equal(one, answer) for one in _ALTERNATIVES.split(gold))
    gold, answer = clean(gold), clean(answer)
    if squeeze(gold) == squeeze(answer):
        return bool(squeeze(gold))
    if r"\ldots" in gold + answer:
        return False  # who can say what stands for the dots
    if (choice := choice_of(gold)) and (chosen := choice_of(answer)):
        return choice == chosen  # before `B: 14` is read as a ratio
    try:
        return _same(read_shape(gold), read_shape(answer))
    except TooDeep:
        return False


@lru_cache(maxsize=256)
def is_parsable(gold: str) -> bool:
    """Whether a gold is understood, so that an answer can be compared with it."""
    if _INTEGER.fullmatch(gold):
        return True
    if not gold.strip() or len(gold) > MAX_LENGTH:
        return False
    if _ALTERNATIVES.search(gold):
        return all(is_parsable(one) for one in _ALTERNATIVES.split(gold))
    try:
        return _is_readable(read_shape(clean(gold)))
    except TooDeep:
        return False


def _is_readable(shape: Shape) -> bool:
    if isinstance(shape, Words):
        return bool(shape.text)
    if isinstance(shape, Value):
        return is_name(shape) or is_readable(shape.text)
    return bool(children(shape)) and all(map(_is_readable, children(shape)))


def _same(gold: Shape, answer: Shape) -> bool:
    gold, answer = spread(_single(gold)), spread(_single(answer))
    if isinstance(gold, Words) or isinstance(answer, Words):
        return _same_words(gold, answer)
    if isinstance(gold, Relation) or isinstance(answer, Relation):
        return same_relation(gold, answer, _same)
    if isinstance(gold, Ratio) or isinstance(answer, Ratio):
        return _same_ratio(gold, answer)
    if isinstance(gold, Value) and isinstance(answer, Value):
        return same_value(gold.text, answer.text)
    if isinstance(gold, Interval) != isinstance(answer, Interval):
        gold, answer = _open_interval(gold), _open_interval(answer)
    if isinstance(gold, Items) or isinstance(answer, Items):
        return _same_items(gold, answer)
    if isinstance(gold, Union) and isinstance(answer, Union):
        return _match_all(gold.parts, answer.parts)
    if isinstance(gold, Interval) and isinstance(answer, Interval):
        return gold.closed == answer.closed and _same(gold.low, answer.low) and _same(gold.high, answer.high)
    if isinstance(gold, Matrix) and isinstance(answer, Matrix):
        return gold.bars == answer.bars and _same_rows(gold, answer)
    return False


def _open_interval(shape: Shape) -> Shape:
    """(1, 4), which is read as a pair, as the open interval that it can be too."""
    if isinstance(shape, Items) and shape.kind == "tuple" and len(shape.items) == 2:
        return Interval(shape.items[0], shape.items[1], (False, False))
    return shape


def _single(shape: Shape) -> Shape:
    """A set of one element is its element."""
    while isinstance(shape, Items) and len(shape.items) == 1:
        shape = shape.items[0]
    return shape


def _same_words(gold: Shape, answer: Shape) -> bool:
    def words(shape: Shape) -> str | None:
        if isinstance(shape, Words):
            return shape.text
        if isinstance(shape, Value):
            return fold(re.sub(r"\\text\{([^{}]*)\}", r"\1", shape.text))
        return None

    return words(gold) is not None and words(gold) == words(answer)


def _same_ratio(gold: Shape, answer: Shape) -> bool:
    """Proportional terms, or the fraction of two; a time of day is compared term by term."""
    if isinstance(gold, Ratio) and isinstance(answer, Ratio):
        if _in_order(gold.parts, answer.parts):
            return True
        if len(gold.parts) != len(answer.parts):
            return False
    if any(isinstance(side, Ratio) and _is_time(side) for side in (gold, answer)):
        return False
    g, a = _quotients(gold), _quotients(answer)
    return g is not None and a is not None and _in_order(g, a)


def _quotients(shape: Shape) -> tuple[Shape, ...] | None:
    """Every term over the last one; of a fraction, itself."""
    if isinstance(shape, Value) and ("/" in shape.text or r"\frac" in shape.text):
        return (shape,)
    if not isinstance(shape, Ratio) or not all(isinstance(part, Value) for part in shape.parts):
        return None
    terms = [part.text for part in shape.parts if isinstance(part, Value)]
    return tuple(Value(rf"\frac{{{term}}}{{{terms[-1]}}}") for term in terms[:-1])


def _is_time(ratio: Ratio) -> bool:
    last = ratio.parts[-1]
    return isinstance(last, Value) and bool(re.match(r"\s*[0-5]\d(?!\d)", last.text))


def _in_order(gold: tuple[Shape, ...], answer: tuple[Shape, ...]) -> bool:
    return len(gold) == len(answer) and all(_same(g, a) for g, a in zip(gold, answer, strict=True))


def _match_all(gold: tuple[Shape, ...], answer: tuple[Shape, ...]) -> bool:
    """Whether they are the same but for order, repeated ones counted."""
    if len(gold) != len(answer):
        return False
    left = list(answer)
    for g in gold:
        found = next((k for k, a in enumerate(left) if _same(g, a)), None)
        if found is None:
            return False
        del left[found]
    return True


def _same_rows(gold: Matrix, answer: Matrix) -> bool:
    return len(gold.rows) == len(answer.rows) and all(map(_in_order, gold.rows, answer.rows))


def _same_items(gold: Shape, answer: Shape) -> bool:
    if isinstance(gold, Matrix) or isinstance(answer, Matrix):
        return _same_vector(gold, answer)
    if not isinstance(gold, Items) or not isinstance(answer, Items):
        return False
    kinds = {gold.kind, answer.kind}
    if kinds <= {"list", "set"} and not _named_apart(gold, answer):
        return _match_all(gold.items, answer.items)
    if "set" in kinds:
        return False
    return _in_order(gold.items, answer.items)  # brackets left off a pair are forgiven, its order is not


def _named_apart(gold: Items, answer: Items) -> bool:
    """Whether one side names its values differently and the other does not name them: then their order says which."""
    names = [{name_of(item) for item in items.items} for items in (gold, answer)]
    return {None} in names and any(len(some) > 1 for some in names)


def _same_vector(gold: Shape, answer: Shape) -> bool:
    """A pair and the column (or row) vector of the same entries."""

    def entries(shape: Shape) -> tuple[Shape, ...] | None:
        if isinstance(shape, Items) and shape.kind in ("tuple", "bracket"):
            return shape.items
        if isinstance(shape, Matrix) and not shape.bars:
            if len(shape.rows) == 1:
                return shape.rows[0]
            if all(len(row) == 1 for row in shape.rows):
                return tuple(row[0] for row in shape.rows)
        return None

    g, a = entries(gold), entries(answer)
    return g is not None and a is not None and _in_order(g, a)
