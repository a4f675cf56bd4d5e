import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from d3s_megatron.ops import mix64

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)


def test_known_answers():
    # splitmix64 seeded with 0: its first output; and the same finaliser chained by a second word
    assert mix64(0) == 0xE220A8397B1DCDAF - (1 << 64)
    assert mix64(0, 0) != mix64(0)


@given(st.lists(INT64, min_size=1, max_size=4))
def test_ints_and_tensors_agree(words):
    want = mix64(*words)
    assert mix64(*(torch.tensor(w) for w in words)).item() == want
    assert mix64(*words[:-1], torch.tensor([words[-1]])).tolist() == [want]


def test_uids_never_share_a_key():
    keys = mix64(7, 3, torch.arange(100_000))
    assert keys.unique().numel() == 100_000
    assert mix64(7, 3, 5) == keys[5].item() != mix64(3, 7, 5)


def test_floats_are_refused():
    with pytest.raises(ValueError, match="float32"):
        mix64(torch.zeros(3))
    with pytest.raises(ValueError, match="no words"):
        mix64()
