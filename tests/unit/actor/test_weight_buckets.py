"""The stream of weights in buckets: whole, in order, and bounded."""

import torch
from builders import tiny_model
from hypothesis import given
from hypothesis import strategies as st

from d3s_megatron.actor.config import ActorConfig, OptimizerConfig
from d3s_megatron.actor.megatron_actor import MegatronActor
from d3s_megatron.actor.parallel import init_parallel, shutdown
from d3s_megatron.actor.weights import _buckets, weight_stream


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 200), st.sampled_from([2, 4, 8]))
def test_buckets_follow_one_another_and_hold_no_more_than_asked(sizes, bucket_bytes, width):
    header = [(f"w{i}", (size,)) for i, size in enumerate(sizes)]
    buckets = list(_buckets(header, bucket_bytes, width))
    assert [i for bucket in buckets for i in bucket] == list(range(len(sizes)))
    for bucket in buckets:
        assert len(bucket) == 1 or sum(sizes[i] * width for i in bucket) <= bucket_bytes


def test_bucket_sizes_change_no_weight(tmp_path):
    layout = init_parallel(ActorConfig())
    try:
        actor = MegatronActor(str(tiny_model(tmp_path)), ActorConfig(), OptimizerConfig(), layout, 1.0, 1)
        whole = {name: tensor.clone() for name, tensor in actor.weights()}
        for bucket_bytes in (1, 3000):
            parts = {
                n: t.clone() for n, t in weight_stream(actor.chunks, actor.shape, layout, bucket_bytes=bucket_bytes)
            }
            assert whole.keys() == parts.keys() and all(torch.equal(whole[name], parts[name]) for name in whole)
    finally:
        shutdown()
