"""A line now and then while answers take long, so that a long generation does not look like a hang."""

from __future__ import annotations

import os
import sys
import time

SAY_EVERY_SECONDS = 30.0


class ProgressLine:
    """Says on standard error how many of `total` answers are there; the first rank speaks, for its own share."""

    def __init__(self, total: int, every: float = SAY_EVERY_SECONDS) -> None:
        """The clock starts now; nothing is said within the first `every` seconds."""
        self._total, self._every, self._before = total, every, 0
        self._start = self._said = time.monotonic()
        self._speaks = os.environ.get("RANK", "0") == "0"

    def begin(self, num_before: int) -> None:
        """A part begins, after `num_before` answers; `update` counts from there."""
        self._before = num_before

    def update(self, num_done: int, num_tokens: int = 0) -> None:
        """Answers of this part and, where they are counted, tokens so far."""
        now = time.monotonic()
        if not self._speaks or now - self._said < self._every:
            return
        self._said = now
        tokens = f", {num_tokens} tokens" if num_tokens else ""
        text = f"  rollout: {self._before + num_done} of {self._total} answers{tokens} after {now - self._start:.0f} s"
        print(text, file=sys.stderr, flush=True)
