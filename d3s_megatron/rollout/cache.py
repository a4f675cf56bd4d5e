"""A key-value cache that grows by doubling: appending one token does not copy all the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

_FIRST_ROOM = 64  # least room made at a growth, in tokens; short answers then copy once


class GrowingLayer(DynamicLayer):
    """One layer's keys and values [B, heads, tokens, head width]: views of buffers with room to spare."""

    keys: Tensor
    values: Tensor
    _buffers: tuple[Tensor, Tensor] | None = None

    def __init__(self, max_tokens: int) -> None:
        """Doubling stops at `max_tokens`, beyond which nothing can come."""
        super().__init__()
        self.max_tokens = max_tokens

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Appends the new tokens and returns all of them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states, value_states
            return self.keys, self.values
        old = self.keys.shape[-2]
        new = old + key_states.shape[-2]
        if self._buffers is None or self._buffers[0].shape[-2] < new:
            room = max(new, min(old + max(old, _FIRST_ROOM), self.max_tokens))
            self._buffers = _with_room(self.keys, room), _with_room(self.values, room)
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, old:new] = states
        self.keys, self.values = (buffer[:, :, :new] for buffer in self._buffers)
        return self.keys, self.values

    def select(self, rows: Tensor) -> None:
        """Keeps the given rows [B'] of the batch, in that order; a row may come several times."""
        self.keys, self.values = self.keys.index_select(0, rows), self.values.index_select(0, rows)
        self._buffers = None


def _with_room(states: Tensor, room: int) -> Tensor:
    batch, heads, tokens, width = states.shape
    buffer = torch.empty(batch, heads, room, width, dtype=states.dtype, device=states.device)
    buffer[:, :, :tokens] = states
    return buffer


def new_cache(num_layers: int, max_tokens: int) -> Cache:
    """An empty cache for rows of at most `max_tokens`; it never drops a token.

    A model with a sliding window gets the window from its attention mask alone.
    """
    return Cache(layers=[GrowingLayer(max_tokens) for _ in range(num_layers)])


def select_rows(cache: Cache, rows: Tensor) -> None:
    """Keeps the given rows [B'] of the batch in every layer."""
    for layer in cache.layers:
        assert isinstance(layer, GrowingLayer)
        layer.select(rows)


def join_rows(caches: Sequence[Cache]) -> Cache:
    """One cache with the rows of all, in order; each must hold the same number of tokens."""
    joined = caches[0]
    for layers in zip(*(cache.layers for cache in caches), strict=True):
        layers[0].keys = torch.cat([layer.keys for layer in layers])
        layers[0].values = torch.cat([layer.values for layer in layers])
    return joined
