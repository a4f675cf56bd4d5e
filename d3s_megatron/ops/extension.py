"""The one door to the compiled module, and the choice between it and the torch references."""

from __future__ import annotations

import contextlib
import contextvars
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Literal

import torch  # noqa: F401  torch's OpenMP runtime is loaded first, whichever module a program imports first

Backend = Literal["reference", "extension"]

INTERFACE = 5  # what the calls in this folder expect of the module; setup.py reads it and builds it in
BUILD_NOTE = Path(__file__).resolve().parent.parent / "_ext_build.txt"  # written by setup.py where a build failed

REMEDY = "install a C++17 compiler, then: pip install -e . --no-build-isolation --no-deps"

_choice: contextvars.ContextVar[Backend | None] = contextvars.ContextVar("d3s_ops_backend", default=None)
_module: ModuleType | None = None
_why_missing: str | None = None


def _load() -> None:
    global _module, _why_missing
    try:
        found = importlib.import_module("d3s_megatron._ext")
    except ModuleNotFoundError:
        _why_missing = BUILD_NOTE.read_text().strip() if BUILD_NOTE.exists() else "it was never built"
    except ImportError as error:  # built for another machine: the references take over, and the state says so
        _why_missing = f"{type(error).__name__}: {error}"
    else:
        if found.INTERFACE == INTERFACE:
            _module = found
        else:
            _why_missing = f"it was built from other sources (interface {found.INTERFACE}, here {INTERFACE})"


_load()


def module() -> ModuleType | None:
    """The compiled module for this call, or None where the torch reference is to run.

    Raises RuntimeError where `backend("extension")` was asked for and the module is not there.
    """
    choice = _choice.get()
    if choice == "reference":
        return None
    if choice == "extension" and _module is None:
        raise RuntimeError(f"the ops extension is asked for and missing: {_why_missing}; {REMEDY}")
    return _module


def why_missing() -> str | None:
    """Why the compiled module is not loaded; None where it is."""
    return _why_missing


@contextlib.contextmanager
def backend(name: Backend | None) -> Iterator[None]:
    """Run the ops inside with one backend: "reference", "extension", or None for the best there is."""
    if name not in ("reference", "extension", None):
        raise ValueError(f"backend={name!r}; choose 'reference', 'extension' or None")
    token = _choice.set(name)
    try:
        yield
    finally:
        _choice.reset(token)
