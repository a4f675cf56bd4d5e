"""Peak anonymous memory of this process while something runs: mapped and cached file pages do not count."""

from __future__ import annotations

import resource
import threading
from pathlib import Path

_STATUS = Path("/proc/self/status")
_INTERVAL = 0.005  # s


def anonymous_bytes() -> int:
    """Anonymous resident memory now; where the system does not tell, the largest resident size so far."""
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class AnonymousPeak:
    """Context manager that samples `anonymous_bytes` from a thread."""

    def __enter__(self) -> AnonymousPeak:
        self.start = self.peak = anonymous_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *args: object) -> None:
        self._stop.set()
        self._thread.join()
        self.peak = max(self.peak, anonymous_bytes())

    @property
    def added(self) -> int:
        """Bytes above what was held at the start."""
        return self.peak - self.start

    def _watch(self) -> None:
        while not self._stop.wait(_INTERVAL):
            self.peak = max(self.peak, anonymous_bytes())
