"""`torch.compile` that loads its compiler when a compiled function is first called, not when it is defined.

megatron-core decorates small functions with it at import, most of which no run calls. torch then imports its whole
compiler, 2.5 s of processor time on every rank and for every command (torch 2.13).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch


@contextlib.contextmanager
def late_compile() -> Iterator[None]:
    """Inside, functions that are given to a plain `torch.compile` wait for it until their first call."""
    right: Any = torch.compile

    def compile(function: Any = None, *args: Any, **kwargs: Any) -> Any:
        if type(function) is not FunctionType or args or kwargs:
            return right(function, *args, **kwargs)
        compiled: Callable | None = None

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal compiled
            if compiled is None:
                compiled = right(function)
            return compiled(*args, **kwargs)

        return call

    setattr(torch, "compile", compile)  # noqa: B010  mypy refuses the assignment
    try:
        yield
    finally:
        setattr(torch, "compile", right)  # noqa: B010
