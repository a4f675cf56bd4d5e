"""Ragged is a sequence like the list it stands for."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from d3s_megatron.ragged import Ragged


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=6), st.integers(0, 7), st.integers(0, 7))
def test_it_is_the_list_of_its_tensors(rows, first, last):
    tensors = [torch.tensor(row, dtype=torch.int64) for row in rows]
    ragged = Ragged.of(tensors, torch.int64)
    assert [one.tolist() for one in ragged] == rows
    assert [ragged[i].tolist() for i in range(-len(rows), len(rows))] == rows + rows
    assert [one.tolist() for one in ragged[first:last]] == rows[first:last]
    assert ragged.flat.tolist() == [value for row in rows for value in row] and ragged.flat.dtype == torch.int64
    assert ragged.owner.tolist() == [i for i, row in enumerate(rows) for _ in row]
    assert Ragged.of(ragged) is ragged
    assert [one.tolist() for one in Ragged.full(ragged.lengths, True)] == [[True] * len(row) for row in rows]
