"""Reward functions for the tests of the worker pool: some behave, some do everything but."""

import os
import signal
import sys
import time
from pathlib import Path


def length(text: str, gold: str) -> float:
    """Text length over the gold."""
    return len(text) / float(gold)


def obey(text: str, gold: str) -> float | tuple[float, str]:
    """Do what the text says; `gold` is a file to leave a mark in."""
    if gold:
        with Path(gold).open("a") as file:
            file.write(f"{os.getpid()}\n")
    verb, _, rest = text.partition(" ")
    if verb == "say":
        return float(rest)
    if verb == "sleep":
        time.sleep(float(rest))
        return 1.0
    if verb == "spin":
        while True:
            pass
    if verb == "die":
        os.kill(os.getpid(), signal.SIGSEGV)
    if verb == "grow":
        return float(len(bytearray(8 << 30)))
    if verb == "raise":
        raise RuntimeError("on purpose")
    if verb == "recurse":
        return obey(text, "")
    if verb == "nan":
        return float("nan")
    if verb == "none":
        return 0.0, "no_answer"
    if verb == "print":
        print("noise")
        return 1.0
    if verb == "torch":
        return float("torch" in sys.modules)
    if verb == "pid":
        return float(os.getpid())
    if verb == "once":  # dies in its first life
        if len(Path(gold).read_text().splitlines()) == 1:
            os._exit(3)
        return 1.0
    raise ValueError(verb)
