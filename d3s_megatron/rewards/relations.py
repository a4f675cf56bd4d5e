r"""Equations and inequalities: names that may be left off, the same line written in another way, and intervals.

`same` is the comparison of shapes (equal.py), given to these functions so that this file does not import it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import mpmath

from d3s_megatron.rewards.clean import squeeze
from d3s_megatron.rewards.evaluation import TooLarge, evaluate, precision
from d3s_megatron.rewards.expression import Node, read_expression, symbols
from d3s_megatron.rewards.identity import sample_point
from d3s_megatron.rewards.shapes import Interval, Items, Relation, Shape, Union, Value, Words
from d3s_megatron.rewards.tokens import Unreadable

Same = Callable[[Shape, Shape], bool]

_NAME = re.compile(
    r"(?:P\s*\([^()=]*\)|\\[a-zA-Z]++\s*|[a-zA-Z]\s*|\{[a-zA-Z ]*\}|_\s*(?:\{[^{}]*\}|\w)\s*|'|\^\s*\{?\s*\\prime\s*\}?"
    r"|\^\s*\{?\s*-\s*1\s*\}?|\([\w,\s]*\)|\|)++"
)
_OUTPUT = re.compile(r"y|[fghp]\(?[a-z]?\)?")  # y, f(x): what a rule is for, and not part of it
_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
_NEAR = mpmath.mpf(10) ** -35


def same_relation(gold: Shape, answer: Shape, same: Same) -> bool:
    """Whether two shapes, at least one of them a relation, say the same."""
    if _is_inequality(gold) or _is_inequality(answer):
        return _same_inequality(gold, answer, same)
    if isinstance(gold, Relation) and isinstance(answer, Relation):
        return _same_equation(gold, answer, same)
    if isinstance(gold, Relation):
        named = _named_value(gold)
        return named is not None and gold.ops[-1] == "=" and same(named, answer)
    assert isinstance(answer, Relation)
    return set(answer.ops) == {"="} and _worked_out(answer, same) and same(gold, _result(answer))


def spread(shape: Shape) -> Shape:
    r"""`x = 3, 4` and `x \in \{3, 4\}` as the list x = 3, x = 4; `x < 1, x > 2` as the union of intervals."""
    if isinstance(shape, Relation) and shape.ops == ("=",) and isinstance(shape.sides[1], Items):
        values = shape.sides[1]
        if values.kind in ("list", "set") and is_name(shape.sides[0]):
            return Items(values.kind, tuple(Relation((shape.sides[0], value), ("=",)) for value in values.items))
    if isinstance(shape, Items) and shape.kind == "list" and all(map(_is_inequality, shape.items)):
        sets = [_as_set(item) for item in shape.items]
        if all(sets) and len({name for name, _ in filter(None, sets)}) == 1:
            return Union(tuple(interval for _, interval in filter(None, sets)))
    return shape


def is_name(shape: Shape) -> bool:
    """Whether a side only names what the other side is: x, f(x), A_{max}, words."""
    if isinstance(shape, Items):  # (x, y)
        return shape.kind == "tuple" and all(map(is_name, shape.items))
    return isinstance(shape, Words) or isinstance(shape, Value) and bool(_NAME.fullmatch(shape.text.strip()))


def name_of(shape: Shape) -> str | None:
    """The name on the left of an equation, or None."""
    if isinstance(shape, Relation) and set(shape.ops) == {"="} and is_name(shape.sides[0]):
        return _spelling(shape.sides[0])
    return None


def _spelling(shape: Shape) -> str:
    return squeeze(shape.text) if isinstance(shape, Value | Words) else repr(shape)


def _named_value(relation: Relation) -> Shape | None:
    """What a gold like `x = 5` names, so that `5` is an answer to it."""
    if relation.ops[0] != "=":
        return None
    if is_name(relation.sides[0]):
        return relation.sides[-1]
    return relation.sides[0] if is_name(relation.sides[-1]) and len(relation.sides) == 2 else None


def _result(relation: Relation) -> Shape:
    first, last = relation.sides[0], relation.sides[-1]
    return first if is_name(last) and not is_name(first) and len(relation.sides) == 2 else last


def _worked_out(relation: Relation, same: Same) -> bool:
    """Whether every side that is a plain value agrees with the result: `3 \\cdot 4 = 12`, and not `3 \\cdot 4 = 13`."""
    result = _result(relation)
    return all(side is result or _has_symbols(side) or same(result, side) for side in relation.sides)


def _has_symbols(side: Shape) -> bool:
    tree = _tree(side)
    return tree is None or bool(symbols(tree))


def _tree(shape: Shape) -> Node | None:
    if not isinstance(shape, Value):
        return None
    try:
        return read_expression(shape.text)
    except Unreadable:
        return None


def _same_equation(gold: Relation, answer: Relation, same: Same) -> bool:
    if set(gold.ops) != set(answer.ops) or len(set(gold.ops)) != 1:
        return False
    g, a = gold.sides[0], answer.sides[0]
    if is_name(g) and is_name(a):
        both_outputs = bool(_OUTPUT.fullmatch(_spelling(g)) and _OUTPUT.fullmatch(_spelling(a)))
        if (_spelling(g) == _spelling(a) or both_outputs) and same(gold.sides[-1], answer.sides[-1]):
            return True
    if len(gold.sides) == len(answer.sides) == 2:
        left, right = answer.sides
        if same(g, left) and same(gold.sides[1], right) or same(g, right) and same(gold.sides[1], left):
            return True
    return _same_zeros(gold, answer)


def _difference(relation: Relation) -> Node | None:
    left, right = _tree(relation.sides[0]), _tree(relation.sides[-1])
    return Node("add", (left, Node("neg", (right,)))) if left and right else None


def _same_zeros(gold: Relation, answer: Relation) -> bool:
    g, a = _difference(gold), _difference(answer)
    if g is None or a is None or not symbols(g) or symbols(g) != symbols(a):
        return False
    try:
        with precision():
            return _factor(g, a) is not None or _solved_for(gold, a) or _solved_for(answer, g)
    except (TooLarge, ZeroDivisionError, OverflowError, ValueError):
        return False


def _factor(g: Node, a: Node) -> Any:
    """The constant c with g = c * a everywhere, or None."""
    names, factors = sorted(symbols(g)), []
    for index in range(4):
        point = sample_point(names, index)
        x, y = evaluate(g, point, True), evaluate(a, point, True)
        if x == 0 or y == 0:
            return None
        factors.append(x / y)
    if any(abs(factor - factors[0]) > _NEAR * abs(factors[0]) for factor in factors):
        return None
    return factors[0]


def _solved_for(relation: Relation, other: Node) -> bool:
    """Whether `relation` is y = f(...) and `other` is linear in y and zero there: then both are the same line."""
    for name, rule in ((relation.sides[0], relation.sides[-1]), (relation.sides[-1], relation.sides[0])):
        symbol, tree = _tree(name), _tree(rule)
        if symbol is None or tree is None or symbol.op != "sym" or symbol.args[0] in symbols(tree):
            continue
        y, names = symbol.args[0], sorted(symbols(tree) | symbols(other))
        for index in range(4):
            point = sample_point(names, index)
            at = evaluate(tree, point, True)
            zero, one, two = (evaluate(other, {**point, y: at + step}, True) for step in (0, 1, 2))
            if abs(zero) > _NEAR or abs(one) < _NEAR or abs(two - 2 * one) > _NEAR * abs(one):
                return False
        return True
    return False


def _is_inequality(shape: Shape) -> bool:
    return isinstance(shape, Relation) and all(op in _FLIPPED for op in shape.ops)


def _as_set(shape: Shape) -> tuple[str, Shape] | None:
    """(name, interval) of an inequality for one bare symbol."""
    if not isinstance(shape, Relation):
        return None
    sides, ops = shape.sides, shape.ops
    if len(sides) == 2 and not is_name(sides[0]) and is_name(sides[1]):
        sides, ops = sides[::-1], (_FLIPPED[ops[0]],)
    if len(sides) == 2 and is_name(sides[0]):
        if ops[0] in ("<", "<="):
            return _spelling(sides[0]), Interval(Value(r"-\infty"), sides[1], (False, ops[0] == "<="))
        return _spelling(sides[0]), Interval(sides[1], Value(r"\infty"), (ops[0] == ">=", False))
    if len(sides) == 3 and is_name(sides[1]):
        if ops[0] in (">", ">=") and ops[1] in (">", ">="):
            sides, ops = sides[::-1], (_FLIPPED[ops[1]], _FLIPPED[ops[0]])
        if ops[0] in ("<", "<=") and ops[1] in ("<", "<="):
            return _spelling(sides[1]), Interval(sides[0], sides[2], (ops[0] == "<=", ops[1] == "<="))
    return None


def _same_inequality(gold: Shape, answer: Shape, same: Same) -> bool:
    g = _as_set(gold) if _is_inequality(gold) else (name_of(gold), _bare(gold))
    a = _as_set(answer) if _is_inequality(answer) else (name_of(answer), _bare(answer))
    if g and a:
        return (g[0] is None or a[0] is None or g[0] == a[0]) and same(g[1], a[1])
    if not (_is_inequality(gold) and _is_inequality(answer)):
        return False
    assert isinstance(gold, Relation) and isinstance(answer, Relation)
    if len(gold.ops) != 1 or len(answer.ops) != 1 or gold.ops[0].count("=") != answer.ops[0].count("="):
        return False
    left, right = _difference(gold), _difference(answer)
    if left is None or right is None or symbols(left) != symbols(right):
        return False
    try:
        with precision():
            factor = _factor(left, right)
    except (TooLarge, ZeroDivisionError, OverflowError, ValueError):
        return False
    return factor is not None and (mpmath.re(factor) > 0) == (gold.ops == answer.ops)


def _bare(shape: Shape) -> Shape:
    return shape.sides[-1] if isinstance(shape, Relation) else shape
