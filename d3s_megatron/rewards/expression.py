r"""LaTeX expressions, read into a small tree in linear time.

Why not the library's parser first: its grammar takes seconds for a dozen nested brackets, drops subscripts and what
follows `\ldots`. What is not understood here raises `Unreadable`, and the library may then try.

Grammar, loosest first: sum, product (explicit, `/`, and implicit), sign, power, postfix `!`, atom.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from d3s_megatron.rewards.tokens import Cursor, Unreadable, tokens_of

MAX_DEPTH = 40
MAX_DIGITS = 2000  # of one literal; Python itself refuses to read more than 4300


@dataclass(frozen=True)
class Node:
    """An operation with its arguments, or a leaf: `num` (Fraction), `sym` (name)."""

    op: str
    args: tuple[Any, ...]


_INVERSES = {"sin": "arcsin", "cos": "arccos", "tan": "arctan", "cot": "arccot"}
_NAMED = set("sin cos tan cot sec csc arcsin arccos arctan arccot sinh cosh tanh exp ln log lg".split())
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
    return _Reader(tokens_of(text)).read()


_ONE = Node("num", (Fraction(1),))


def _multiply(factors: list[Node]) -> Node:
    return Node("mul", tuple(factors)) if len(factors) > 1 else factors[0]


class _Reader(Cursor):
    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        super().__init__(tokens)
        self._depth = self._in_bars = 0

    def read(self) -> Node:
        if not self._tokens:
            raise Unreadable("empty")
        node = self._sum()
        if self._position < len(self._tokens):
            raise Unreadable(f"unexpected {self._peek()}")
        return node

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
            if not any(character.isalpha() for character in inside):
                raise Unreadable("a mark over a number")
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
            return self._atom()  # \sin(x)^2 is the square of the sine
        factors = [self._signed_operand()]
        while self._starts_factor() and self._peek()[1:] not in _NAMED and self._peek() not in ("(", "["):
            factors.append(self._implicit(factors))
        return _multiply(factors)

    def _signed_operand(self) -> Node:
        if self._peek() == "-":
            self._take()
            return Node("neg", (self._power(),))
        return self._power()

    def _symbol(self, name: str) -> Node:
        name = self._spelled(name)
        known = name.split("_")[0].rstrip("'") in _UNKNOWN_FUNCTIONS
        at_a_number = self._kind(1) == "number" and self._peek(2) == ")"  # I(0) is no product with 0
        if self._peek() == "(" and (known or at_a_number):
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
