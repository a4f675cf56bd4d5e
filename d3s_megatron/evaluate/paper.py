"""The paper's results (arXiv 2509.22115), to stand beside ours: Pass@1 / Pass@8 in percent over 32 answers a problem.

Read from third-party notes that reprint its tables, not from the paper itself; what they leave out is empty here.
"""

from __future__ import annotations

import math

SETS = ("aime24", "aime25", "amc23", "gsm8k", "math500", "minerva", "olympiadbench")

Pair = tuple[float, float] | None  # (Pass@1, Pass@8)


def text_of(cell: Pair) -> str:
    """A cell of the table: both numbers, the first where the second is not known (NaN), nothing where neither is."""
    if cell is None:
        return ""
    return " / ".join(f"{value:.1f}" if math.isfinite(value) else "" for value in cell).rstrip(" /")


def _cell(text: str) -> Pair:
    if text == "?":
        return None
    one, eight = map(float, text.split("/"))
    return one, eight


def _row(cells: str, average: Pair) -> tuple[Pair, ...]:
    pairs = [_cell(cell) for cell in cells.split()] or [None] * len(SETS)
    return (*pairs, average)


# One value for each of SETS, then the average.
RESULTS: dict[str, tuple[Pair, ...]] = {
    "Qwen2.5-Math-7B": _row("8.9/33.2 2.3/13.4 22.8/70.4 30.1/83.2 27.9/64.6 8.4/33.7 4.1/14.6", (14.9, 44.7)),
    "Qwen2.5-Math-7B, GRPO": _row("13.2/37.6 5.5/21.6 47.0/83.5 64.9/94.3 48.5/70.2 19.8/45.0 9.7/19.8", (29.8, 53.1)),
    "Qwen2.5-Math-7B, GRPO+PODS": _row(
        "16.1/40.5 7.8/24.5 52.8/81.5 73.3/95.0 53.0/71.1 24.6/47.5 11.0/20.7", (34.1, 54.4)
    ),
    "Qwen2.5-Math-7B, D1S": _row("13.2/42.9 5.9/20.2 50.6/84.4 ? 50.1/70.5 ? ?", (31.3, 54.2)),
    "Qwen2.5-Math-7B, D1S-C": _row("17.3/40.0 7.7/25.6 51.9/83.3 ? 52.8/70.9 ? ?", (34.1, 54.7)),
    "Qwen2.5-Math-7B, D2S": _row("16.9/42.2 6.0/21.2 49.6/82.8 ? 49.5/70.7 ? ?", (31.3, 54.1)),
    "Qwen2.5-Math-7B, GRPO+D3S": _row(
        "20.3/48.2 7.9/25.8 54.4/87.1 73.4/95.7 52.2/71.5 25.0/48.2 10.7/20.8", (34.3, 56.8)
    ),
    "Qwen2.5-Math-7B, GSPO": _row("", (33.2, 54.7)),
    "Qwen2.5-Math-7B, GSPO+D3S": _row(
        "18.3/43.3 8.3/26.9 53.2/83.8 76.0/96.1 54.9/71.4 28.4/51.1 11.5/21.1", (35.8, 56.2)
    ),
    "Llama3.1-8B-Instruct, GRPO": _row("2.0/5.0 0.0/0.0 13.7/33.4 78.6/93.5 31.5/52.0 15.9/35.6 2.1/7.2", (20.5, 32.4)),
    "Llama3.1-8B-Instruct, GRPO+D3S": _row(
        "5.3/20.7 0.1/0.8 20.3/50.8 79.0/95.0 35.9/59.2 22.5/44.3 3.3/10.7", (23.8, 40.2)
    ),
    "Llama3.1-8B-Instruct, GRPO+D3S-I": _row("", (24.0, 40.2)),
    "Qwen2.5-Math-1.5B, GRPO": _row("", (32.0, 50.2)),
    "Qwen2.5-Math-1.5B, GRPO+D3S": _row("", (33.1, 51.8)),
}

NOTES = (
    "The paper's set MATH is compared with MATH-500 here.",
    "The seven cells of GRPO+D3S on Qwen2.5-Math-7B average to 34.8 Pass@1; 34.3 is what the paper reports.",
)
