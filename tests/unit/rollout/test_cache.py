"""The growing cache holds what a cache of plain concatenation holds."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from d3s_megatron.rollout.cache import join_rows, new_cache, select_rows


@settings(deadline=None)
@given(st.lists(st.one_of(st.integers(1, 100), st.lists(st.integers(0, 1), min_size=2, max_size=3)), max_size=8))
def test_growing_and_selecting_equal_concatenation(actions):
    generator = torch.Generator().manual_seed(0)
    cache, keys, values = new_cache(1, max_tokens=1000), torch.empty(2, 1, 0, 2), torch.empty(2, 1, 0, 2)
    for action in [3, *actions, 1]:
        if isinstance(action, list):
            rows = torch.tensor(action)
            select_rows(cache, rows)
            keys, values = keys[rows], values[rows]
        else:
            new_keys, new_values = torch.randn(2, len(keys), 1, action, 2, generator=generator)
            keys, values = torch.cat([keys, new_keys], 2), torch.cat([values, new_values], 2)
            got = cache.update(new_keys, new_values, 0)
            assert torch.equal(got[0], keys) and torch.equal(got[1], values)
            assert cache.get_seq_length() == keys.shape[2]


def test_room_is_made_by_doubling_up_to_the_limit():
    cache = new_cache(1, max_tokens=300)
    rooms = []
    for _ in range(300):
        cache.update(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2), 0)
        rooms.append(0 if cache.layers[0]._buffers is None else cache.layers[0]._buffers[0].shape[2])
    assert sorted(set(rooms)) == [0, 65, 130, 260, 300]


def test_joined_rows_stand_in_order():
    caches = [new_cache(2, max_tokens=9) for _ in range(2)]
    states = torch.randn(2, 2, 3, 1, 4, 2)  # cache, layer, row, ...
    for cache, layers in zip(caches, states, strict=True):
        for index, layer in enumerate(layers):
            cache.update(layer, -layer, index)
    joined = join_rows(caches)
    for index, layer in enumerate(joined.layers):
        assert torch.equal(layer.keys, states[:, index].flatten(0, 1)) and torch.equal(layer.values, -layer.keys)
