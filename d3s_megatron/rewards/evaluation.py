r"""The value of an expression tree, worked out without ever building a huge number.

Rational numbers are exact (`exact`); anything else is a floating point number of DIGITS digits (`evaluate`), so that
2^-80 and 2^-81 are told apart. What would be too large raises `TooLarge` before it is computed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from fractions import Fraction
from math import comb, factorial, prod
from typing import Any

import mpmath

from d3s_megatron.rewards.expression import Node

MAX_BITS = 200_000  # of an exact number: 2^1009, 2023! and 999^4 are welcome, 9^{9^9} is not
MAX_EXPONENT = 1_000_000  # |y log x| of x^y in floating point
MAX_FACTORIAL = 10_000
MAX_CHOOSE = 100_000
DIGITS = 60  # of floating point evaluation

_FUNCTIONS = {
    "sin": mpmath.sin, "cos": mpmath.cos, "tan": mpmath.tan, "cot": mpmath.cot, "sec": mpmath.sec, "csc": mpmath.csc,
    "arcsin": mpmath.asin, "arccos": mpmath.acos, "arctan": mpmath.atan, "arccot": mpmath.acot,
    "sinh": mpmath.sinh, "cosh": mpmath.cosh, "tanh": mpmath.tanh, "exp": mpmath.exp, "ln": mpmath.log,
    "abs": abs, "floor": mpmath.floor, "ceil": mpmath.ceil,
}  # fmt: skip
_ODD_DEGREES = range(3, 100, 2)


class TooLarge(ValueError):
    """The value is too large to be worked out."""


def exact(node: Node) -> Fraction | None:
    """The value of a tree that is a rational number by its form alone; None where it is not.

    Raises:
        TooLarge: the number would have more than MAX_BITS bits.
        ZeroDivisionError: it divides by zero.
    """
    if node.op == "num":
        return node.args[0]
    if node.op not in ("add", "neg", "mul", "div", "pow", "fact", "choose", "abs", "floor", "ceil", "root"):
        return None
    values = [exact(child) for child in node.args]
    if any(value is None for value in values):
        return None
    a, b = values[0], values[-1]
    assert a is not None and b is not None
    if node.op == "neg":
        return -a
    if node.op == "abs":
        return abs(a)
    if node.op == "floor":
        return Fraction(a.numerator // a.denominator)
    if node.op == "ceil":
        return Fraction(-(-a.numerator // a.denominator))
    if node.op in ("add", "mul"):
        total = a
        for value in values[1:]:
            assert value is not None
            total = _checked(total + value if node.op == "add" else total * value)
        return total
    if node.op == "div":
        return _checked(a / b)
    if node.op == "pow":
        return _exact_power(a, b)
    if node.op == "fact":
        if a.denominator != 1 or a < 0:
            return None
        if a > MAX_FACTORIAL:
            raise TooLarge(f"factorial of {a}")
        return Fraction(factorial(int(a)))
    if node.op == "choose":
        if a.denominator != 1 or b.denominator != 1 or a < 0 or b < 0:
            return None
        if min(b, a - b) > 0 and (a > MAX_CHOOSE or _bits(a) * min(b, a - b) > MAX_BITS):
            raise TooLarge(f"{a} choose {b}")
        return Fraction(comb(int(a), int(b)))
    return None  # a root: rational only by luck, left to floating point


def _exact_power(base: Fraction, exponent: Fraction) -> Fraction | None:
    if exponent.denominator != 1:
        return None
    if base in (0, 1, -1):
        return base ** (int(exponent) if base == 0 else int(exponent) % 2)
    if abs(exponent) * _bits(base) > MAX_BITS:
        raise TooLarge("power")
    return base ** int(exponent)


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _checked(value: Fraction) -> Fraction:
    if _bits(value) > MAX_BITS:
        raise TooLarge("rational number")
    return value


def evaluate(node: Node, point: Mapping[str, Any], natural_log: bool) -> Any:
    """The value at a point (symbol -> number) to about DIGITS digits, real or complex; call it inside `precision()`.

    `natural_log` says how a `\\log` without a base is read. Unknown functions get a value fixed by name and argument.

    Raises:
        TooLarge, ZeroDivisionError, ValueError: there is no value.
    """

    def value(child: Node) -> Any:
        return evaluate(child, point, natural_log)

    op, args = node.op, node.args
    if op == "num":
        return mpmath.mpf(args[0].numerator) / args[0].denominator
    if op == "sym":
        return point[args[0]]
    if op == "pi":
        return +mpmath.pi
    if op == "e":
        return +mpmath.e
    if op == "i":
        return mpmath.mpc(0, 1)
    if op == "apply":
        return _unknown_function(args[0], value(args[1]))
    if op == "neg":
        return -value(args[0])
    if op == "add":
        return sum(map(value, args))
    if op == "mul":
        return prod(map(value, args))
    if op == "div":
        return value(args[0]) / value(args[1])
    if op == "pow":
        return _power(value(args[0]), value(args[1]))
    if op == "root":
        radicand, degree = value(args[0]), value(args[1])
        if (
            mpmath.im(radicand) == 0
            and mpmath.re(radicand) < 0
            and degree == int(mpmath.re(degree))
            and degree % 2 == 1
        ):
            return -_power(-mpmath.re(radicand), 1 / degree)  # the real cube root
        return _power(radicand, 1 / degree)
    if op in ("fact", "fact2", "choose"):
        values = [value(child) for child in args]
        if any(abs(v) > MAX_FACTORIAL for v in values):
            raise TooLarge(op)
        return {"fact": mpmath.factorial, "fact2": mpmath.fac2, "choose": mpmath.binomial}[op](*values)
    if op == "log":
        if len(args) == 2:
            return mpmath.log(value(args[0])) / mpmath.log(value(args[1]))
        return mpmath.log(value(args[0])) / (1 if natural_log else mpmath.log(10))
    if op == "lg":
        return mpmath.log(value(args[0])) / mpmath.log(10)
    argument = value(args[0])
    if op == "exp":
        return _power(+mpmath.e, argument)
    if (
        abs(argument) > mpmath.mpf(10) ** (DIGITS // 2)
        or op in ("sinh", "cosh", "tanh")
        and abs(argument) > MAX_EXPONENT
    ):
        raise TooLarge(op)  # no digits would be left of its phase
    return _FUNCTIONS[op](argument)


def _power(base: Any, exponent: Any) -> Any:
    if base == 0:
        if mpmath.re(exponent) < 0:
            raise ZeroDivisionError("0 to a negative power")
        return mpmath.mpf(1) if exponent == 0 else mpmath.mpf(0)
    if abs(exponent) * abs(mpmath.log(abs(base))) > MAX_EXPONENT or abs(exponent) > 1e15:
        raise TooLarge("power")
    return mpmath.power(base, exponent)


def _unknown_function(name: str, argument: Any) -> Any:
    key = f"{name}({mpmath.nstr(mpmath.mpmathify(argument), 25)})"
    number = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")
    return mpmath.mpf(number) / 2**64 + mpmath.mpf(1) / 3


def precision(factor: int = 1) -> Any:
    """The context in which values are worked out, to a multiple of DIGITS digits."""
    return mpmath.workdps(factor * DIGITS)
