"""Where kept rollouts are trained: the same answer on every rank, in any order, balanced in every mini-batch."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from d3s_megatron.actor.exchange import plan_shares
from d3s_megatron.actor.packing import cost, distribute


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
        costs = [int(cost(whole[(minibatch == m) & (replica == r)]).sum()) for r in range(num_replicas)]
        assert max(costs) - min(costs) <= int(cost(whole).max())


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 30)), min_size=1, max_size=40), st.integers(1, 4))
def test_samples_of_a_prompt_go_to_one_replica_as_far_as_shares_stay_even(groups, num_replicas):
    """Groups of (samples, tokens of a response), behind prompts of 20 tokens."""
    group = torch.tensor([i for i, (num, _) in enumerate(groups) for _ in range(num)])
    prompts = torch.full_like(group, 20)
    whole = prompts + torch.tensor([tokens for num, tokens in groups for _ in range(num)])
    replica = distribute(whole, num_replicas, prompts, group)
    loads, pieces = [], 0
    for r in range(num_replicas):
        mine = group[replica == r]
        loads.append(int(cost(whole[replica == r]).sum()) - 20 * (len(mine) - len(mine.unique())))
        pieces += len(mine.unique())
    piece = int(cost(whole).sum()) / (4 * num_replicas) + int(cost(whole).max())
    assert max(loads) - min(loads) <= piece + 20 * len(group)  # what two pieces of a group on a rank save is not seen
    assert pieces <= len(groups) + 4 * num_replicas
    assert torch.equal(replica, distribute(whole, num_replicas, prompts, group))


def test_samples_go_their_own_ways_where_prompts_are_short():
    lengths = torch.tensor([1000, 500, 500])
    assert distribute(lengths, 2, torch.tensor([9, 9, 9]), torch.zeros(3)).tolist() == [0, 1, 1]
