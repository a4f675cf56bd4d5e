import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from d3s_megatron.ops import backend, balanced_partition, first_fit


def naive_first_fit(lengths, capacity):
    bins, sums = [], []
    for i, n in enumerate(lengths):
        for b in range(len(bins)):
            if sums[b] + n <= capacity:
                break
        else:
            b = len(bins)
            bins.append([])
            sums.append(0)
        bins[b].append(i)
        sums[b] += n
    return bins


@given(st.lists(st.integers(0, 20), max_size=40))
def test_first_fit_is_first_fit(lengths):
    want = naive_first_fit(lengths, 20)
    assert first_fit(lengths, 20) == want
    with backend("reference"):
        assert first_fit(lengths, 20) == want


def test_first_fit_refuses_what_cannot_fit():
    with pytest.raises(ValueError, match=r"lengths\[1\]=11; a bin holds 0 to 10"):
        first_fit([3, 11], 10)


@given(st.lists(st.integers(0, 3) | st.integers(0, 1 << 40), max_size=40), st.integers(1, 7) | st.integers(30, 90))
def test_backends_agree(lengths, parts):
    """Ties, lengths of 0, and more parts than lengths included; the compiled path keeps no empty part."""
    with backend("reference"):
        want = balanced_partition(lengths, parts)
    assert balanced_partition(lengths, parts) == want
    lengths = (lengths * parts)[: len(lengths) // parts * parts]
    with backend("reference"):
        want = balanced_partition(lengths, parts, equal_count=True)
    assert balanced_partition(lengths, parts, equal_count=True) == want


@pytest.mark.parametrize("most", [1, 7, 5000])
@pytest.mark.parametrize("parts", [3, 61, 400])
def test_backends_agree_on_a_batch(most, parts):
    lengths = [hash((i, most)) % (most + 1) for i in range(900)]
    with backend("reference"):
        want = balanced_partition(lengths, parts)
    assert balanced_partition(lengths, parts) == want


@given(st.lists(st.integers(0, 1000), max_size=30), st.integers(1, 6))
def test_partition_covers_and_is_even(lengths, parts):
    lists = balanced_partition(lengths, parts)
    assert sorted(i for p in lists for i in p) == list(range(len(lengths)))
    assert len(lists) == parts
    sums = [sum(lengths[i] for i in p) for p in lists]
    assert max(sums) - min(sums) <= max(lengths, default=0)  # moving one length cannot be worth more


@given(st.lists(st.integers(0, 1000), min_size=24, max_size=24), st.sampled_from([1, 2, 3, 4, 6, 12]))
def test_equal_counts(lengths, parts):
    assert {len(p) for p in balanced_partition(lengths, parts, equal_count=True)} == {24 // parts}


def test_partition_known():
    assert balanced_partition([8, 7, 6, 5, 4], 2) == [[0, 2], [1, 3, 4]]
    assert balanced_partition([4, 4, 4, 4], 2) == balanced_partition([4, 4, 4, 4], 2)
    with pytest.raises(ValueError, match="num_parts=0"):
        balanced_partition([1], 0)
    with pytest.raises(ValueError, match=r"lengths\[1\]=-2"):
        balanced_partition([1, -2], 2)
    with pytest.raises(ValueError, match="5 lengths"):
        balanced_partition([1] * 5, 2, equal_count=True)
    with pytest.raises(ValueError, match="the sum must stay below 2"):
        balanced_partition([1 << 62] * 2, 2)
    assert balanced_partition([torch.tensor(3).item(), 2.0, True], 2) == [[0], [1, 2]]
