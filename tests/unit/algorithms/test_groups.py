import pytest
import torch

from d3s_megatron.algorithms.groups import number_groups


@pytest.mark.parametrize(
    ("ids", "numbers"),
    [
        ([], []),
        ([5], [0]),
        ([2, 2, 7, 7, 9], [0, 0, 1, 1, 2]),
        ([7, -3, 7, 1], [2, 0, 2, 1]),
        ([-(1 << 63), (1 << 63) - 1, -(1 << 63)], [0, 1, 0]),
    ],
)
def test_groups_are_numbered_by_their_ids(ids, numbers):
    got, num = number_groups(torch.tensor(ids, dtype=torch.int64))
    assert (got.tolist(), num) == (numbers, len(set(ids)))
