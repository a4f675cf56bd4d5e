"""Counter-based hashing: the same 64-bit key from Python ints and from int64 tensors, on every machine."""

from __future__ import annotations

from typing import overload

from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: splitmix64's counter step
_MUL_1 = 0xBF58476D1CE4E5B9  # splitmix64's finaliser (Steele, Lea, Flood 2014; constants by Stafford)
_MUL_2 = 0x94D049BB133111EB


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _finalise_int(z: int) -> int:
    z = ((z ^ (z >> 30)) * _MUL_1) & _MASK
    z = ((z ^ (z >> 27)) * _MUL_2) & _MASK
    return z ^ (z >> 31)


def _logical_shift(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)  # torch's >> on int64 copies the sign bit; the mask removes it


def _finalise_tensor(z: Tensor) -> Tensor:
    z = (z ^ _logical_shift(z, 30)) * _signed(_MUL_1)  # int64 products wrap, as splitmix wants
    z = (z ^ _logical_shift(z, 27)) * _signed(_MUL_2)
    return z ^ _logical_shift(z, 31)


@overload
def mix64(*words: int) -> int: ...
@overload
def mix64(first: Tensor, /, *words: int | Tensor) -> Tensor: ...
@overload
def mix64(first: int, second: Tensor, /, *words: int | Tensor) -> Tensor: ...
@overload
def mix64(first: int, second: int, third: Tensor, /, *words: int | Tensor) -> Tensor: ...
def mix64(*words: int | Tensor) -> int | Tensor:
    """Hash words to one signed 64-bit key; a tensor where any word is one (int64, broadcast), else an int.

    With all words but one fixed the map is a bijection, so distinct uids never share a key under one (seed, step).
    Words outside int64 are taken modulo 2^64. Used as the tie key of method 4, row 4: mix64(seed, step, uid).
    """
    if not words:
        raise ValueError("mix64() got no words; pass at least one int or int64 tensor")
    state: int | Tensor = 0
    for word in words:
        if isinstance(word, Tensor):
            if word.is_floating_point() or word.is_complex():
                raise ValueError(f"mix64: a word has dtype {word.dtype}; pass int64")
            word = word.long()
        else:
            word = _signed(int(word))
        if isinstance(state, Tensor):
            state = _finalise_tensor((state + _signed(_GOLDEN)) ^ word)
        elif isinstance(word, Tensor):
            state = _finalise_tensor(word ^ _signed(state + _GOLDEN))
        else:
            state = _finalise_int(((state + _GOLDEN) & _MASK) ^ (word & _MASK))
    return state if isinstance(state, Tensor) else _signed(state)
