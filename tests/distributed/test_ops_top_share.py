"""The exact top share over real processes: one set of tokens, whatever the number of ranks and the shards."""

import json

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ranks import context

from d3s_megatron.ops import backend, extension, mix64, top_share

KINDS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
BACKENDS = ["reference"] + (["extension"] if extension.why_missing() is None else [])


def batch(n):
    """Scores with many zeros and repeats, uids hashed as training does, positions within the rollout."""
    g = torch.Generator().manual_seed(n)
    scores = torch.randn(n, generator=g).abs().mul(4).round() * (torch.rand(n, generator=g) > 0.4)
    rollout = torch.arange(n) // 37
    return scores, mix64(5, 2, rollout), torch.arange(n) % 37


def rank_main(rank, size, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    moved = 0

    def reduce(tensor, how):
        nonlocal moved
        moved += tensor.numel() * tensor.element_size()
        dist.all_reduce(tensor, KINDS[how])
        return tensor

    out = {}
    for n in (3, 1000, 400_000):
        scores, uid, position = batch(n)
        # uneven shards, dealt like a shuffled batch; the first rank of three has nothing
        owner = torch.arange(n) % size if size == 2 else 1 + (torch.arange(n) % 7 > 4).long()
        mine = (owner == rank).nonzero()[:, 0]
        for name in BACKENDS:
            with backend(name):
                for rho in (0.1, 0.55, 1.0):
                    moved = 0
                    mask = top_share(scores[mine], rho, uid[mine], position[mine], reduce)
                    out[f"{name} {n} {rho}"] = mine[mask].tolist() if n < 10_000 else [int(mask.sum())]
                    assert moved <= 192 * 1024, moved
    bad = torch.ones(4)
    bad[2] = torch.nan if rank == 0 else 1.0
    ids = torch.arange(4) + 4 * rank
    with pytest.raises(ValueError, match=f"1 NaN and 0 infinite values among {4 * size}"):  # on every rank
        top_share(bad, 0.5, ids, ids, reduce)
    with open(f"{folder}/{rank}.json", "w") as f:
        json.dump(out, f)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_pick_one_set(size, tmp_path):
    context()
    mp.start_processes(rank_main, args=(size, str(tmp_path)), nprocs=size, start_method="forkserver")
    ranks = [json.loads((tmp_path / f"{r}.json").read_text()) for r in range(size)]
    for name in ranks[0]:
        _, n, rho = name.split()
        scores, uid, position = batch(int(n))
        with backend("reference"):
            want = top_share(scores, float(rho), uid, position)
        everyone = sorted(i for rank in ranks for i in rank[name])
        if int(n) < 10_000:
            assert everyone == want.nonzero()[:, 0].tolist(), name
        else:
            assert sum(everyone) == int(want.sum())
