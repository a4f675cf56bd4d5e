"""The text of each token, so that the pieces together are the answer's text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

BROKEN = "\ufffd"  # what a decoder gives for a part of a character


def clean(text: str) -> str:
    """Text without lone surrogates, which no UTF-8 file can hold."""
    return text.encode("utf-8", "replace").decode()


class Pieces:
    """Decodes tokens one by one; each id is decoded once."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is a transformers tokenizer."""
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}
        # Some decoders strip the space before a first token; nothing is first behind an anchor.
        self._anchor = self._some_id()
        self._start = len(self._decode([self._anchor]))

    def of(self, ids: Sequence[int]) -> list[str]:
        """One piece a token; where several tokens make one character, it stands at the first of them."""
        self._learn(set(ids) - self._known.keys())
        pieces = [self._known[i] for i in ids]
        at = 0
        while at < len(pieces):
            if BROKEN not in pieces[at]:
                at += 1
                continue
            end = at + 1
            while end < len(pieces) and BROKEN in pieces[end]:
                end += 1
            together = self._decode([self._anchor, *ids[at:end]])[self._start :]
            pieces[at:end] = [together, *[""] * (end - at - 1)]
            at = end
        return pieces

    def _learn(self, ids: Iterable[int]) -> None:
        for i in ids:
            self._known[i] = self._decode([self._anchor, i])[self._start :]

    def _decode(self, ids: Sequence[int]) -> str:
        text = self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return clean(text)

    def _some_id(self) -> int:
        """A token that decodes to plain text, by itself and before another."""
        special = set(self._tokenizer.all_special_ids)
        for i in range(len(self._tokenizer)):
            text = self._tokenizer.decode([i], skip_special_tokens=False)
            if i not in special and len(text) == 1 and text.isascii() and text.isprintable() and text != " ":
                return i
        return next(iter(special), 0)
