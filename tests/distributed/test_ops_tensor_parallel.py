"""Vocabulary-parallel ops over real processes: the same bits on every rank, the right gradient on each."""

import pytest
import torch
import torch.distributed as dist
from helpers import HANG_SECONDS
from ranks import context

from d3s_megatron.ops import linear_logprob, logprob_entropy


def tensor_parallel(rank, size, store, queue):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    group = dist.group.WORLD
    out = {}
    # C04: logits [0, 1 | 2, 3], target 3
    if size == 2:
        x = torch.tensor([[0.0, 1, 2, 3]])[:, rank * 2 : rank * 2 + 2].clone().requires_grad_()
        lp, _ = logprob_entropy(x, torch.tensor([3]), tp_group=group)
        lp.sum().backward()
        out["c04"] = (lp.detach(), x.grad)
        low = torch.tensor([[-200.0, -201.0]])[:, rank : rank + 1]
        out["c07"] = logprob_entropy(low, torch.tensor([0]), tp_group=group)[1]
    g = torch.Generator().manual_seed(3)
    per, vocab = 12, 12 * size - 5
    full = torch.randn(9, per * size, generator=g) * 4 + 50
    full[3, : per * (size - 1)] = -torch.inf  # all of the mass on the last shard
    y = torch.randint(0, vocab, (9,), generator=g)
    y[3] = per * (size - 1)
    w = torch.randn(9, 2, generator=g)
    x = full[:, rank * per : (rank + 1) * per].clone().requires_grad_()
    lp, h = logprob_entropy(x, y, temperature=0.9, vocab_size=vocab, tp_group=group, entropy_grad=True)
    (lp * w[:, 0] + h * w[:, 1]).sum().backward()
    out["lp"], out["h"], out["grad"] = lp.detach(), h.detach(), x.grad
    hidden, weight = torch.randn(9, 6, generator=g), torch.randn(per * size, 6, generator=g)
    hidden.requires_grad_()
    part = weight[rank * per : (rank + 1) * per].clone().requires_grad_()
    lp2, h2 = linear_logprob(hidden, part, y, vocab_size=vocab, tp_group=group, entropy_grad=True, tile=5)
    (lp2 * w[:, 0] + h2 * w[:, 1]).sum().backward()
    dist.all_reduce(hidden.grad)  # the caller's part of the contract
    out["lin"] = (lp2.detach(), h2.detach(), hidden.grad, part.grad)
    queue.put((rank, out))
    queue.join()
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_rank_agrees(size, tmp_path):
    forks = context()
    queue = forks.JoinableQueue()
    args = (size, str(tmp_path / "store"), queue)
    ranks = [forks.Process(target=tensor_parallel, args=(r, *args)) for r in range(size)]
    for p in ranks:
        p.start()
    outs = {}
    for _ in ranks:
        r, out = queue.get(timeout=HANG_SECONDS)
        outs[r] = {k: [t.clone() for t in v] if isinstance(v, tuple) else v.clone() for k, v in out.items()}
    for _ in ranks:
        queue.task_done()
    for p in ranks:
        p.join(HANG_SECONDS)
        assert p.exitcode == 0
    if size == 2:
        torch.testing.assert_close(outs[0]["c04"][1], torch.tensor([[-0.0320586, -0.0871443]]), rtol=0, atol=1e-6)
        torch.testing.assert_close(outs[1]["c04"][1], torch.tensor([[-0.2368828, 0.3560857]]), rtol=0, atol=1e-6)
        assert -outs[0]["c04"][0].item() == pytest.approx(0.440190, abs=1e-6)  # C05
        assert outs[1]["c07"].item() == pytest.approx(0.582203, abs=1e-6)
    per, vocab = 12, 12 * size - 5
    g = torch.Generator().manual_seed(3)
    full = torch.randn(9, per * size, generator=g) * 4 + 50
    full[3, : per * (size - 1)] = -torch.inf
    y = torch.randint(0, vocab, (9,), generator=g)
    y[3] = per * (size - 1)
    w = torch.randn(9, 2, generator=g)
    whole = full.clone().requires_grad_()
    lp, h = logprob_entropy(whole, y, temperature=0.9, vocab_size=vocab, entropy_grad=True)
    (lp * w[:, 0] + h * w[:, 1]).sum().backward()
    hidden, weight = torch.randn(9, 6, generator=g), torch.randn(per * size, 6, generator=g)
    hidden.requires_grad_(), weight.requires_grad_()
    lin = linear_logprob(hidden, weight, y, vocab_size=vocab, entropy_grad=True)
    (lin[0] * w[:, 0] + lin[1] * w[:, 1]).sum().backward()
    for r, out in outs.items():
        assert torch.equal(out["lp"], outs[0]["lp"]) and torch.equal(out["h"], outs[0]["h"])
        torch.testing.assert_close(out["lp"], lp.detach(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(out["h"], h.detach(), rtol=1e-6, atol=1e-7)
        columns = slice(r * per, (r + 1) * per)
        torch.testing.assert_close(out["grad"], whole.grad[:, columns], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(out["lin"][0], lin[0].detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(out["lin"][2], hidden.grad, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(out["lin"][3], weight.grad[columns], rtol=1e-4, atol=1e-5)
