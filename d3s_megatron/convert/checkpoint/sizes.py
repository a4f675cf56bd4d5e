"""Sizes as people write them."""

from __future__ import annotations

import re

_UNITS = {"TB": 10**12, "GB": 10**9, "MB": 10**6, "KB": 10**3, "B": 1}


def size_text(nbytes: int) -> str:
    """3087467136 -> "3.09 GB"; units are powers of 1000, as those of disks."""
    unit, scale = next(((unit, scale) for unit, scale in _UNITS.items() if nbytes >= scale), ("B", 1))
    return f"{nbytes} B" if scale == 1 else f"{nbytes / scale:.2f} {unit}"


def parse_size(text: str) -> int:
    """ "5GB" or "5000000000" -> bytes; ValueError where it is no size above zero."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([TGMK]?B)?\s*", text, re.IGNORECASE)
    nbytes = int(float(match[1]) * _UNITS[(match[2] or "B").upper()]) if match else 0
    if nbytes < 1:
        raise ValueError(f"{text!r} is no size: write it like 5GB or 500MB")
    return nbytes
