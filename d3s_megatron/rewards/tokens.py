"""Tokens of a LaTeX expression, and a place among them: what reading needs before any grammar."""

from __future__ import annotations

import re

MAX_TOKENS = 2000


class Unreadable(ValueError):
    """The text is not an expression this module knows."""


_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d*)?|\.\d+)|(?P<command>\\[a-zA-Z]+|\\[{}|])|(?P<letter>[a-zA-Z])|(?P<mark>[-+*/^_!(){}\[\]|,']))"
)


def tokens_of(text: str) -> list[tuple[str, str]]:
    """(kind, spelling) of each: number, command, letter or mark; Unreadable where a character is none of them."""
    tokens: list[tuple[str, str]] = []
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


class Cursor:
    """The tokens that are still to be read; looking ahead beyond their end finds an empty one."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self._tokens, self._position = tokens, 0

    def _peek(self, ahead: int = 0) -> str:
        position = self._position + ahead
        return self._tokens[position][1] if position < len(self._tokens) else ""

    def _kind(self, ahead: int = 0) -> str:
        position = self._position + ahead
        return self._tokens[position][0] if position < len(self._tokens) else ""

    def _take(self, *expected: str) -> str:
        token = self._peek()
        if not token or (expected and token not in expected):
            raise Unreadable(f"expected {expected}, found {token!r}")
        self._position += 1
        return token

    def _raw_until_close(self) -> str:
        """The tokens up to the bracket that closes the one just taken, which is taken too."""
        depth = 1
        inside: list[str] = []
        while True:
            token = self._take()
            depth += (token in "{(") - (token in "})")
            if not depth:
                return "".join(inside)
            inside.append(token)

    def _spelled(self, name: str) -> str:
        """A name with the primes and subscripts that follow it, which are taken."""
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
                return name
