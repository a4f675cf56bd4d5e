"""Argument checks shared by the ops; every message has the argument's name, its value and the remedy."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor


def require(ok: bool, message: str) -> None:
    """Raise ValueError(message) unless ok."""
    if not ok:
        raise ValueError(message)


def is_real(x: Any) -> bool:
    """Whether x is a number, NaN and infinity among them."""
    return isinstance(x, Real)


def is_whole(x: Any) -> bool:
    """Whether x is an integer of any kind: Python's, numpy's, or a float such as 3.0."""
    return isinstance(x, Integral) or (isinstance(x, Real) and float(x).is_integer())


def require_tensor(name: str, x: Any) -> None:
    """Raise ValueError unless x is a tensor with an element for every index."""
    require(isinstance(x, Tensor), f"{name} is a {type(x).__name__}; pass a torch tensor")
    require(x.layout == torch.strided, f"{name} has layout {x.layout}; pass tensor.to_dense()")


def require_vector(name: str, x: Tensor, dtype: torch.dtype, like: Tensor | None = None) -> None:
    """Raise ValueError unless x is a 1-D tensor of the dtype, as long as `like` and on its device."""
    # No message is made where all is right.
    if isinstance(x, Tensor) and x.dtype == dtype and x.dim() == 1 and x.layout == torch.strided:
        if like is None or (x.shape == like.shape and x.device == like.device):
            return
    require_tensor(name, x)
    require(x.dim() == 1, f"{name} has shape {tuple(x.shape)}; pass one dimension")
    require(x.dtype == dtype, f"{name} has dtype {x.dtype}; pass {dtype}")
    if like is not None:
        require(x.shape == like.shape, f"{name} has {len(x)} entries where {len(like)} are needed")
        require(x.device == like.device, f"{name} is on {x.device}, the other tensors on {like.device}; move it")
