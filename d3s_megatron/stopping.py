"""Ends a run between two steps: on SIGTERM or SIGUSR1 to any rank, or when a file named `stop` appears.

A cluster that takes the machine back sends a signal first; where signals do not reach the ranks, or reach only a
batch script, `touch OUTPUT_DIR/stop` does the same. The step that runs is finished, saved, and the run ends with
exit code 0; a second signal ends it at once.
"""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import torch

from d3s_megatron.actor.parallel import Layout, world_reduce

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
STOP_FILE = "stop"


class Stop:
    """Whether the run has been asked to end."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        """`folder` is the run's; a stop file of an earlier run in it is removed."""
        self._file, self._layout = folder / STOP_FILE, layout
        self._caught: int | None = None
        self._before = {}
        if layout.rank == 0:
            self._file.unlink(missing_ok=True)
        if threading.current_thread() is threading.main_thread():  # Python takes handlers nowhere else
            self._before = {number: signal.signal(number, self._catch) for number in SIGNALS}

    def wanted(self) -> str:
        """Why the run is to end, on every rank alike; empty where it is not; a collective."""
        asked = self._caught or 0
        if not asked and self._layout.rank == 0 and self._file.exists():
            self._file.unlink()
            asked = -1
        both = torch.tensor([asked, -asked])
        highest, negated_lowest = world_reduce(self._layout)(both, "max").tolist()
        if highest > 0:
            return signal.Signals(highest).name
        return f"the file {self._file}" if negated_lowest > 0 else ""

    def close(self) -> None:
        """Gives the signals back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _catch(self, number: int, frame: object) -> None:
        if self._caught is not None:
            self.close()
            signal.raise_signal(number)
        self._caught = number
