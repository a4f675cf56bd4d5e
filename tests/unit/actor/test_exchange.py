"""Where kept rollouts are trained: the same answer on every rank, in any order, balanced in every mini-batch."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from d3s_megatron.actor.exchange import plan_shares
from d3s_megatron.actor.packing import cost


@given(st.lists(st.integers(2, 500), max_size=40), st.integers(1, 5), st.integers(1, 4), st.randoms())
def test_shares_do_not_depend_on_the_order_and_minibatches_are_even(lengths, num_minibatches, num_replicas, random):
    uids = torch.arange(len(lengths)) * 3 + 1
    whole = torch.tensor(lengths, dtype=torch.int64)
    minibatch, replica = plan_shares(uids, whole, num_minibatches, num_replicas, seed=7, step=2)
    order = list(range(len(lengths)))
    random.shuffle(order)
    again = plan_shares(uids[order], whole[order], num_minibatches, num_replicas, seed=7, step=2)
    assert again[0].equal(minibatch[order]) and again[1].equal(replica[order])
    sizes = minibatch.bincount()
    assert len(sizes) == min(num_minibatches, len(lengths)) and (not len(sizes) or sizes.max() - sizes.min() <= 1)
    for m in range(len(sizes)):
        costs = [sum(cost(n) for n in whole[(minibatch == m) & (replica == r)].tolist()) for r in range(num_replicas)]
        assert max(costs) - min(costs) <= max(cost(n) for n in lengths)
