r"""LaTeX expressions, read into a small tree and evaluated without ever building a huge number.

Why not the library's parser first: its grammar takes seconds for a dozen nested brackets, drops subscripts and what
follows `\ldots`, and its comparison takes tiny numbers for zero. Here a tree is read in linear time, what is not
understood raises `Unreadable` (the library may then try), and what would be too large raises `TooLarge`.

Grammar, loosest first: sum, product (explicit, `/`, and implicit), sign, power, postfix `!`, atom.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import comb, factorial, prod
from typing import Any

import mpmath

MAX_DEPTH = 40
MAX_TOKENS = 2000
MAX_DIGITS = 2000  # of one literal; Python itself refuses to read more than 4300
MAX_BITS = 200_000  # of an exact number: 2^1009, 2023! and 999^4 are welcome, 9^{9^9} is not
MAX_EXPONENT = 1_000_000  # |y log x| of x^y in floating point
MAX_FACTORIAL = 10_000
MAX_CHOOSE = 100_000
DIGITS = 60  # of floating point evaluation


class Unreadable(ValueError):
    """The text is not an expression this module knows."""


class TooLarge(ValueError):
    """The value is too large to be worked out."""


@dataclass(frozen=True)
class Node:
    """An operation with its arguments, or a leaf: `num` (Fraction), `sym` (name)."""

    op: str
    args: tuple[Any, ...]


_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d*)?|\.\d+)|(?P<command>\\[a-zA-Z]+|\\[{}|])|(?P<letter>[a-zA-Z])|(?P<mark>[-+*/^_!(){}\[\]|,']))"
)
_FUNCTIONS = {
    "sin": mpmath.sin, "cos": mpmath.cos, "tan": mpmath.tan, "cot": mpmath.cot, "sec": mpmath.sec, "csc": mpmath.csc,
    "arcsin": mpmath.asin, "arccos": mpmath.acos, "arctan": mpmath.atan, "arccot": mpmath.acot,
    "sinh": mpmath.sinh, "cosh": mpmath.cosh, "tanh": mpmath.tanh, "exp": mpmath.exp, "ln": mpmath.log,
    "abs": abs, "floor": mpmath.floor, "ceil": mpmath.ceil,
}  # fmt: skip
_ODD_DEGREES = range(3, 100, 2)
_INVERSES = {"sin": "arcsin", "cos": "arccos", "tan": "arctan", "cot": "arccot"}
_NAMED = {*_FUNCTIONS, "log", "lg"} - {"abs", "floor", "ceil"}
_GREEK = set(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho varrho sigma tau "
    "upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega hbar ell mho".split()
)
_DECORATIONS = {"dot", "ddot", "bar", "overline", "vec", "hat", "tilde", "widehat", "overrightarrow"}
_OF_SEVERAL = {"gcd", "max", "min"}  # compared by the spelling of their arguments
_FACTORS = {*_GREEK, *_NAMED, *_DECORATIONS, "frac", "sqrt", "pi", "binom", *_OF_SEVERAL}
# Letters that are read as functions before a bracket; after any other letter a bracket is a factor.
_UNKNOWN_FUNCTIONS = {"f", "g", "h", "u", "F", "G", "H", "delta", "mho"}


def read_expression(text: str) -> Node:
    """The tree of a cleaned text.

    Raises:
        Unreadable: it is no expression, or has constructions that are not known here.
    """
    return _Reader(_tokens(text)).read()


def _tokens(text: str) -> list[tuple[str, str]]:
    tokens = []
    position, text = 0, text.strip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if not match or len(tokens) >= MAX_TOKENS:
            raise Unreadable(f"unexpected character at {position}")
        kind = match.lastgroup
        assert kind is not None
        tokens.append((kind, match[kind]))
        position = match.end()
    return tokens


_ONE = Node("num", (Fraction(1),))


def _multiply(factors: list[Node]) -> Node:
    return Node("mul", tuple(factors)) if len(factors) > 1 else factors[0]


class _Reader:
    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self._tokens, self._position, self._depth = tokens, 0, 0
        self._in_bars = 0

    def read(self) -> Node:
        if not self._tokens:
            raise Unreadable("empty")
        node = self._sum()
        if self._position < len(self._tokens):
            raise Unreadable(f"unexpected {self._peek()}")
        return node

    def _peek(self, ahead: int = 0) -> str:
        position = self._position + ahead
        return self._tokens[position][1] if position < len(self._tokens) else ""

    def _kind(self) -> str:
        return self._tokens[self._position][0] if self._position < len(self._tokens) else ""

    def _take(self, *expected: str) -> str:
        token = self._peek()
        if not token or (expected and token not in expected):
            raise Unreadable(f"expected {expected}, found {token!r}")
        self._position += 1
        return token

    def _sum(self) -> Node:
        terms = [self._product()]
        while self._peek() in ("+", "-"):
            operator = self._take()
            term = self._product()
            terms.append(term if operator == "+" else Node("neg", (term,)))
        return Node("add", tuple(terms)) if len(terms) > 1 else terms[0]

    def _product(self) -> Node:
        factors = [self._signed()]
        while token := self._peek():
            if token in ("*", r"\cdot", r"\times"):
                self._take()
                factors.append(self._signed())
            elif token in ("/", r"\div"):
                self._take()
                factors.append(Node("div", (_ONE, self._signed())))
            elif self._starts_factor():
                factors.append(self._implicit(factors))
            else:
                break
        return _multiply(factors)

    def _implicit(self, factors: list[Node]) -> Node:
        """The next factor, which no sign precedes; the whole part of a mixed number is taken off `factors`."""
        if self._kind() == "number" and self._tokens[self._position - 1][0] == "number":  # `3 5`: no guessing
            raise Unreadable("two numbers side by side")
        mixed = factors[-1].op == "num" and self._peek() == r"\frac"
        right = self._power()
        if mixed and right.op == "div" and all(part.op == "num" for part in right.args):
            numerator, denominator = (part.args[0] for part in right.args)
            if not 0 < numerator < denominator or factors[-1].args[0].denominator != 1:
                raise Unreadable("not a mixed number")
            return Node("add", (factors.pop(), right))
        return right

    def _starts_factor(self) -> bool:
        token, kind = self._peek(), self._kind()
        if token == "|":
            return not self._in_bars
        if kind in ("number", "letter") or token in ("(", "[", "{", r"\lfloor", r"\lceil"):
            return True
        return kind == "command" and token[1:] in _FACTORS

    def _signed(self) -> Node:
        negative = False
        while self._peek() in ("+", "-"):
            negative ^= self._take() == "-"
        node = self._power()
        return Node("neg", (node,)) if negative else node

    def _power(self) -> Node:
        base = self._postfix(self._atom())
        if self._peek() == "^":
            self._take()
            if self._peek() == r"\circ":
                raise Unreadable("degrees are taken off before")
            base = self._postfix(Node("pow", (base, self._script())))
            if self._peek() == "^":
                raise Unreadable("two powers in a row")
        return base

    def _postfix(self, node: Node) -> Node:
        if self._peek() == "!":
            self._take()
            if self._peek() != "!":
                return Node("fact", (node,))
            self._take()
            return Node("fact2", (node,))
        return node

    def _script(self) -> Node:
        """What follows ^: a group, or a signed number or atom (`x^10` is meant as x^{10})."""
        if self._peek() == "{":
            return self._group("{", "}")
        if self._peek() in ("+", "-"):
            negative = self._take() == "-"
            node = self._atom()
            return Node("neg", (node,)) if negative else node
        return self._atom()

    def _group(self, opening: str, closing: str) -> Node:
        self._take(opening)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Unreadable("nested too deeply")
        bars, self._in_bars = self._in_bars, 0
        node = self._sum()
        self._depth -= 1
        self._in_bars = bars
        self._take(closing)
        return node

    def _argument(self) -> Node:
        """A braced group, or one digit or symbol, as after \\frac and \\sqrt."""
        if self._peek() == "{":
            return self._group("{", "}")
        kind, token = self._tokens[self._position] if self._position < len(self._tokens) else ("", "")
        if kind == "number" and len(token) > 1 and token.isdigit():  # \frac12: one digit each
            self._tokens[self._position : self._position + 1] = [("number", digit) for digit in token]
        return self._atom()

    def _atom(self) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Unreadable("nested too deeply")
        node = self._read_atom()
        self._depth -= 1
        return node

    def _read_atom(self) -> Node:
        kind, token = self._kind(), self._peek()
        if kind == "number":
            if len(token) > MAX_DIGITS:
                raise Unreadable("too many digits")
            self._take()
            return Node("num", (Fraction(token + "0" if token.endswith(".") else token),))
        if token == "(":
            return self._group("(", ")")
        if token == "[":
            return self._group("[", "]")
        if token == "{":
            return self._group("{", "}")
        if token == r"\lfloor":
            return Node("floor", (self._group(r"\lfloor", r"\rfloor"),))
        if token == r"\lceil":
            return Node("ceil", (self._group(r"\lceil", r"\rceil"),))
        if token == "|":
            self._take()
            self._in_bars += 1
            node = self._sum()
            self._in_bars -= 1
            self._take("|")
            return Node("abs", (node,))
        if kind == "letter":
            return self._symbol(self._take())
        if kind == "command":
            return self._command(self._take()[1:])
        raise Unreadable(f"unexpected {token!r}")

    def _command(self, name: str) -> Node:
        if name == "frac":
            if self._peek() == "{" and self._peek(1) in ("d", r"\partial") and (derivative := self._derivative()):
                return self._symbol(derivative)
            return Node("div", (self._argument(), self._argument()))
        if name == "binom":
            return Node("choose", (self._argument(), self._argument()))
        if name == "sqrt":
            degree = self._group("[", "]") if self._peek() == "[" else Node("num", (Fraction(2),))
            radicand = self._group("(", ")") if self._peek() == "(" else self._argument()
            return Node("root", (radicand, degree))
        if name in _NAMED:
            return self._function(name)
        if name in _DECORATIONS:
            self._take("{")
            inside = self._raw_until_close()
            return self._symbol(f"{name}({inside})")
        if name in _OF_SEVERAL and self._peek() == "(":
            self._take()
            return self._symbol(f"{name}({self._raw_until_close()})")
        if name == "pi":
            return Node("pi", ())
        if name in _GREEK:
            return self._symbol(name)
        raise Unreadable(f"unknown command \\{name}")

    def _derivative(self) -> str | None:
        """The spelling of `{d x}{d t}`, which is one unknown quantity and not a quotient of products."""
        start = self._position
        self._take()
        above = self._raw_until_close()
        if self._peek() == "{" and self._peek(1) == self._tokens[start + 1][1] and self._peek(2) not in ("", "}"):
            self._take()
            return f"frac({above})({self._raw_until_close()})"
        self._position = start
        return None

    def _function(self, name: str) -> Node:
        base: Node | None = None
        power: Node | None = None
        while self._peek() in ("^", "_"):
            if self._take() == "^":
                power = self._script()
            elif name == "log":
                base = self._group("{", "}") if self._peek() == "{" else self._argument()
            else:
                raise Unreadable(f"{name} has no base")
        if power == Node("neg", (Node("num", (Fraction(1),)),)) and name in _INVERSES:
            name, power = _INVERSES[name], None
        node = Node("log", (self._operand(), base)) if base else Node(name, (self._operand(),))
        return Node("pow", (node, power)) if power else node

    def _operand(self) -> Node:
        """The argument of a function: a bracket, or the factors up to the next operator or function."""
        if self._peek() in ("(", "[", "{", "|"):
            return self._power()
        factors = [self._signed_operand()]
        while self._starts_factor() and self._peek()[1:] not in _NAMED and self._peek() not in ("(", "["):
            factors.append(self._implicit(factors))
        return _multiply(factors)

    def _signed_operand(self) -> Node:
        if self._peek() == "-":
            self._take()
            return Node("neg", (self._power(),))
        return self._power()

    def _raw_until_close(self) -> str:
        """The tokens up to the bracket that closes the one just taken, which is taken too."""
        depth, inside = 1, []
        while True:
            token = self._take()
            depth += (token in "{(") - (token in "})")
            if not depth:
                return "".join(inside)
            inside.append(token)

    def _symbol(self, name: str) -> Node:
        while True:
            if self._peek() == "'":
                self._take()
                name += "'"
            elif self._peek() == "_":
                self._take()
                if self._peek() == "{":
                    self._take()
                    name += "_" + self._raw_until_close()
                else:
                    name += "_" + self._take()
            elif self._peek() == "^" and r"\prime" in (self._peek(1), self._peek(2)):
                self._take("^")
                if self._peek() == "{":
                    self._take()
                    name += self._raw_until_close().replace(r"\prime", "'")
                else:
                    self._take()
                    name += "'"
            else:
                break
        if self._peek() == "(" and name.split("_")[0].rstrip("'") in _UNKNOWN_FUNCTIONS:
            return Node("apply", (name, self._group("(", ")")))
        if name in ("e", "i"):
            return Node(name, ())
        return Node("sym", (name,))


def symbols(node: Node) -> set[str]:
    """Names of the free symbols and unknown functions of a tree."""
    if node.op == "sym":
        return {node.args[0]}
    names = {node.args[0]} if node.op == "apply" else set()
    return names.union(*(symbols(child) for child in node.args if isinstance(child, Node)))


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


def precision() -> Any:
    """The context in which values are worked out."""
    return mpmath.workdps(DIGITS)
