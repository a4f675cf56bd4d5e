"""Reward functions as a user would write them, named in tests by import path."""

import os
import time
from pathlib import Path


def even_length(text: str, gold: str) -> float:
    """1 where the answer has an even number of characters: random models earn it about half the time."""
    return float(len(text) % 2 == 0)


def never(text: str, gold: str) -> float:
    """Nothing is ever right."""
    return 0.0


def breaks_on_odd(text: str, gold: str) -> float:
    """Raises for answers of odd length."""
    if len(text) % 2:
        raise RuntimeError("no verdict")
    return float(text < "5")


def always(text: str, gold: str) -> float:
    """Everything is right."""
    return 1.0


def held(text: str, gold: str) -> float:
    """As `even_length`; from a run's second step on it waits for a file (HELD: the run's log and that file)."""
    log, go = map(Path, os.environ["HELD"].split(os.pathsep))
    while not go.exists() and log.exists() and '"progress"' in log.read_text():
        time.sleep(0.02)
    return even_length(text, gold)
