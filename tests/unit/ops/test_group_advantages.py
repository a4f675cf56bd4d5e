import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from d3s_megatron.ops import backend, group_advantages

row = st.tuples(
    st.sampled_from([0.0, 1.0, -0.0, 0.1, 0.3]) | st.floats(-1e100, 1e100), st.integers(-2, 3), st.booleans()
)


@given(st.lists(row, max_size=40), st.booleans(), st.booleans())
def test_backends_agree_bit_for_bit(rows, in_order, normalize_std):
    if in_order:
        rows.sort(key=lambda r: r[1])
    values, ids, kept = ([r[i] for r in rows] for i in range(3))
    args = (
        torch.tensor(values, dtype=torch.float64),
        torch.tensor(ids, dtype=torch.int64) * 3_000_000_000_000_000_000,
        torch.tensor(kept, dtype=torch.bool),
    )
    with backend("reference"):
        want = group_advantages(*args, normalize_std)
    assert torch.equal(group_advantages(*args, normalize_std), want)


@pytest.mark.parametrize("name", ["reference", None])
def test_refusals(name):
    rewards, ids, kept = torch.tensor([1.0, float("nan"), 0.0]), torch.zeros(3, dtype=torch.int64), torch.ones(3).bool()
    with backend(name):
        assert group_advantages(rewards, ids, torch.tensor([True, False, True]))[1] == 0
        with pytest.raises(ValueError, match=r"rewards\[1\]=nan"):
            group_advantages(rewards, ids, kept)
        with pytest.raises(ValueError, match="group_ids has 2 entries where 3"):
            group_advantages(rewards, ids[:2], kept)
        with pytest.raises(ValueError, match=r"kept has dtype torch.int64; pass torch.bool"):
            group_advantages(rewards, ids, ids)
