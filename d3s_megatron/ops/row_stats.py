"""Four numbers a token that say all of a softmax row: how they are made, carried between shards, and used.

Row statistics of x = the raw logits of one shard (temperature not yet applied), with c = 1 / temperature:
    m   max x                              s   sum e^(c (x - m)) without the top term, so Z - 1
    W   sum c (m - x) e^(c (x - m))        t   the target's logit, where this shard has it
Every term of s and W is non-negative, so nothing cancels: entropy = log1p(s) + W / Z is right to 1e-6 down to
H = 1e-6 whatever the offset of the logits, where max + log Z - sum p x loses everything. The maximum is kept
unscaled, so that x - m is exact for the entries that matter. 4 float32 = 16 bytes a token move between shards.
"""

from __future__ import annotations

from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

from d3s_megatron.ops import extension
from d3s_megatron.ops.cuda import cuda_kernels

BLOCK_ON_CPU = 1 << 20  # logits a block of rows holds: 4 MB of float32, which stays in a cache
BLOCK_ON_GPU = 1 << 26  # a GPU wants long launches; 256 MB is still small beside the logits


def row_blocks(logits: Tensor) -> range:
    """Starts of row blocks small enough that their float32 copies cost little; the step is the block's size."""
    limit = BLOCK_ON_CPU if logits.device.type == "cpu" else BLOCK_ON_GPU
    return range(0, len(logits), max(1, limit // max(1, logits.shape[1])))


def stats_dtype(logits: Tensor) -> torch.dtype:
    """float32; float64 for float64 logits, which only tests have."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def reference_stats(logits: Tensor, local_targets: Tensor, num_valid: int, inv_temperature: float) -> Tensor:
    """[4, T] of (m, s, W, t) for logits [T, V_tp]; columns from num_valid on are padding; target -1: elsewhere."""
    stats = torch.empty(4, len(logits), dtype=stats_dtype(logits), device=logits.device)
    blocks = row_blocks(logits)
    for start in blocks:
        rows = slice(start, start + blocks.step)
        stats[:, rows] = _block_stats(logits[rows], local_targets[rows], num_valid, inv_temperature)
    return stats


def _block_stats(logits: Tensor, targets: Tensor, num_valid: int, c: float) -> Tensor:
    # float64 inside a block: rounding c (x - m) near 20 to float32 alone would move e^(c (x - m)) by 1e-6
    x = logits[:, :num_valid].double()
    t = torch.where(targets >= 0, logits.gather(1, targets.clamp(min=0)[:, None])[:, 0].double(), 0.0)
    if num_valid == 0:
        zero = torch.zeros_like(t)
        return torch.stack([zero - torch.inf, zero, zero, t])
    m, top = x.max(1)
    below = (x - m[:, None]) * c
    masked = x == -torch.inf  # such an entry has no mass, and a row of nothing else has none at all
    below.masked_fill_(masked, -torch.inf)
    weights = below.exp()
    weights.scatter_(1, top[:, None], 0.0)
    s = weights.sum(1)
    w = (weights * -below.masked_fill(masked, 0.0)).sum(1)
    broken = x.isnan().any(1) | (m == torch.inf)
    return torch.stack([m, s.masked_fill(broken, torch.nan), w.masked_fill(broken, torch.nan), t])


def gather_stats(stats: Tensor, tp_group: dist.ProcessGroup | None) -> Tensor:
    """[R, 4, T]: the statistics of every tensor-parallel rank, by one all-gather of 16 bytes a token."""
    size = 1 if tp_group is None else dist.get_world_size(tp_group)
    if size == 1:
        return stats[None]
    out = torch.empty(size * 4, stats.shape[1], dtype=stats.dtype, device=stats.device)
    dist.all_gather_single(out, stats.contiguous(), group=tp_group)
    return out.view(size, 4, -1)


def combine(shards: Tensor, owner: Tensor, inv_temperature: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(log_prob, entropy, m, log Z), each [T], of shards [R, 4, T]; owner [T] is the shard that has the target.

    Same input, same order of operations: the same bits on every rank.
    """
    m_r, s_r, w_r, t_r = shards.unbind(1)
    m, top = m_r.max(0)
    drop = (m_r - m) * inv_temperature  # <= 0, and 0 for the top shard
    drop = torch.where(m_r == -torch.inf, -torch.inf, drop)
    scale = drop.exp()
    is_top = torch.arange(len(m_r), device=m.device)[:, None] == top
    z_r = scale * (1 + s_r)  # a shard's part of Z; the top shard's leading 1 is left out of the sum
    s = torch.where(is_top, s_r, z_r).sum(0)
    w = (scale * w_r + torch.where(scale > 0, -drop * z_r, 0.0)).sum(0)
    log_z = s.log1p()
    t = t_r.gather(0, owner[None])[0]
    log_prob = (t - m) * inv_temperature - log_z
    entropy = log_z + w / (1 + s)
    nothing = m == -torch.inf
    return log_prob, entropy.masked_fill(nothing, torch.nan), m, log_z


def reference_backward(
    logits: Tensor,
    out: Tensor,
    local_targets: Tensor,
    num_valid: int,
    inv_temperature: float,
    saved: tuple[Tensor, Tensor, Tensor],
    grad_log_prob: Tensor,
    grad_entropy: Tensor | None,
) -> None:
    """Write d loss / d logits [T, V_tp] into out, which may be the logits themselves; saved = (m, log Z, entropy)."""
    m, log_z, entropy = saved
    c, dtype = inv_temperature, stats_dtype(logits)
    blocks = row_blocks(logits)
    for start in blocks:
        rows = slice(start, start + blocks.step)
        log_p = (logits[rows, :num_valid].to(dtype) - m[rows, None]) * c - log_z[rows, None]
        p = log_p.exp()
        g = grad_log_prob[rows, None] * c
        d = -p * g
        h = None
        if grad_entropy is not None:
            h = grad_entropy[rows, None] * c
            d -= h * torch.where(p > 0, p * (log_p + entropy[rows, None]), 0.0)
        targets = local_targets[rows]
        here = (targets >= 0).nonzero()[:, 0]
        if len(here):
            at = targets[here]
            log_pt = log_p[here, at]
            dt = -g[here, 0] * torch.expm1(log_pt)  # 1 - p without cancelling where p is close to 1
            if h is not None:
                pt = log_pt.exp()
                dt -= h[here, 0] * torch.where(pt > 0, pt * (log_pt + entropy[rows][here]), 0.0)
            d[here, at] = dt
        out[rows, :num_valid] = d.to(out.dtype)
        out[rows, num_valid:] = 0


def _compiled(logits: Tensor) -> ModuleType | None:
    """The module that can take these logits, or None."""
    ext = extension.module()
    rows_apart = logits.shape[1] <= 1 or logits.stride(1) == 1
    rows_apart = rows_apart and (len(logits) <= 1 or logits.stride(0) >= logits.shape[1])
    if ext is None or logits.dtype == torch.float64 or not rows_apart:
        return None
    return ext if logits.device.type == "cpu" else cuda_kernels(ext, logits)


class RunningStats:
    """Row statistics that take in one tile of columns after another."""

    def __init__(self, num_tokens: int, like: Tensor) -> None:
        self.ext = _compiled(like)
        # float64 between tiles: a rounding at every tile would add up over hundreds of them
        self.total = torch.zeros(4, num_tokens, dtype=torch.float64, device=like.device)
        self.total[0] = -torch.inf
        self.dtype = stats_dtype(like)

    def add(self, logits: Tensor, local_targets: Tensor, num_valid: int, inv_temperature: float) -> None:
        """Take in logits [T, columns]; local_targets [T] is the target's column in this tile, or -1."""
        if self.ext is None or logits.is_cuda:
            accumulate(self.total, stats(logits, local_targets, num_valid, inv_temperature), inv_temperature)
            return
        flat, threads = self.total.view(-1), torch.get_num_threads()
        state, target = flat[: 3 * len(logits)], self.total[3]
        self.ext.row_stats(logits, local_targets.contiguous(), num_valid, inv_temperature, state, target, threads)

    def result(self) -> Tensor:
        """[4, T] of (m, s, W, t), in the dtype that is gathered."""
        return self.total.to(self.dtype)


def stats(logits: Tensor, local_targets: Tensor, num_valid: int, inv_temperature: float) -> Tensor:
    """`reference_stats` by the fastest backend at hand."""
    kernels = _compiled(logits)
    if kernels is None:
        return reference_stats(logits, local_targets, num_valid, inv_temperature)
    if logits.is_cuda:
        out = torch.empty(4, len(logits), dtype=torch.float32, device=logits.device)
        kernels.row_stats(logits, local_targets.contiguous(), num_valid, inv_temperature, out.view(-1))
        return out
    running = RunningStats(len(logits), logits)
    running.add(logits, local_targets, num_valid, inv_temperature)
    return running.result()


def backward(
    logits: Tensor,
    out: Tensor,
    local_targets: Tensor,
    num_valid: int,
    inv_temperature: float,
    saved: tuple[Tensor, Tensor, Tensor],
    grad_log_prob: Tensor,
    grad_entropy: Tensor | None,
) -> None:
    """`reference_backward` by the fastest backend at hand."""
    ext = _compiled(logits)
    if ext is None or _compiled(out) is None:
        reference_backward(logits, out, local_targets, num_valid, inv_temperature, saved, grad_log_prob, grad_entropy)
        return
    m, log_z, entropy = (x.contiguous() for x in saved)
    local_targets, grad_log_prob = local_targets.contiguous(), grad_log_prob.contiguous()
    grad_entropy = None if grad_entropy is None else grad_entropy.contiguous()
    threads = () if logits.is_cuda else (torch.get_num_threads(),)
    ext.row_backward(
        logits,
        out,
        local_targets,
        num_valid,
        inv_temperature,
        m,
        log_z,
        entropy,
        grad_log_prob,
        grad_entropy,
        *threads,
    )


def accumulate(total: Tensor, tile: Tensor, inv_temperature: float) -> None:
    """Merge the statistics [4, T] of further columns into the total [4, T], in place."""
    m = torch.maximum(total[0], tile[0])
    top_is_tile = tile[0] > total[0]
    s = torch.zeros_like(m)
    w = torch.zeros_like(m)
    for part, is_top in ((total, ~top_is_tile), (tile, top_is_tile)):
        drop = torch.where(part[0] == -torch.inf, -torch.inf, (part[0] - m) * inv_temperature)
        scale = drop.exp()
        z = scale * (1 + part[1])
        s += torch.where(is_top, part[1], z)
        w += scale * part[2] + torch.where(scale > 0, -drop * z, 0.0)
    total[0], total[1], total[2] = m, s, w
    total[3] += tile[3]  # at most one tile has the target; the others hold 0
