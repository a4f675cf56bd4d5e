"""Fewer points of a curve that look the same: the lowest and the highest of every stretch stay, so no spike is lost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MOST_POINTS = 1000  # a panel is at most that many pixels wide


def thin(values: Sequence[float | None], most: int = MOST_POINTS) -> list[int]:
    """Indices to keep, in order; at most `most` of them and the last. None is a gap; a long one stays.

    Args:
        values: one per place; None where there is no finite number.
        most: at least 2.
    """
    num = len(values)
    if num <= most:
        return list(range(num))
    array = np.array([np.nan if value is None else value for value in values], dtype=float)
    borders = np.linspace(0, num, most // 2 + 1).astype(int)
    kept = {num - 1}
    for start, end in zip(borders[:-1], borders[1:], strict=True):
        part = array[start:end]
        if np.isnan(part).all():
            kept.add(int(start))
        else:
            kept |= {int(start + np.nanargmin(part)), int(start + np.nanargmax(part))}
    return sorted(kept)


def spread(num: int, most: int) -> list[int]:
    """At most `most` of 0..num-1, evenly, the first and the last among them."""
    if num <= most:
        return list(range(num))
    return sorted({round(i * (num - 1) / max(1, most - 1)) for i in range(most)}) if most > 1 else [num - 1]
