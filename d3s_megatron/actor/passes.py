"""Forward and backward passes over packed rows, through megatron-core's own pipeline schedules.

Every rank of a model replica calls these with the same rows; what only the last stage knows is sent to the others,
so that all ranks go on with the same numbers. Context-parallel ranks run their share of each row, and all of them
have the values of all scored positions before the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from d3s_megatron import ops
from d3s_megatron.actor import cpu_device
from d3s_megatron.actor.attention import PackedRow, pack_row
from d3s_megatron.actor.context import gather_scored, multiples, share_of
from d3s_megatron.actor.main_grad import weight_and_buffer
from d3s_megatron.actor.model import ActorModel, head_rows
from d3s_megatron.actor.packing import same_length
from d3s_megatron.actor.parallel import Layout, data_parallel_reduce
from d3s_megatron.ops import accumulate
from d3s_megatron.types import LossBatch, TokenBatch

# What the actor is given as its loss: (log-probs [S], LossBatch) -> (summed loss, summed metrics [M]).
LossFn = Callable[[Tensor, LossBatch], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Head:
    """How the output layer is read."""

    vocab_size: int  # columns from here on are padding
    temperature: float
    max_logits_bytes: int
    gather_rows: bool = True  # False: every row goes through the output layer and the loss masks, for comparison


@dataclass(frozen=True)
class _Micro:
    """One micro-batch on the device: this rank's share of a row."""

    token_ids: Tensor  # [1, T_own]
    position_ids: Tensor  # [1, T_own]
    packed: PackedRow
    rows: Tensor  # [S_own] among the T_own tokens
    targets: Tensor  # [S_own]
    scored: Tensor  # [S_own] which of the row's S scored positions these are
    num_scored: int  # S
    loss_batch: LossBatch | None


def _micros(chunks, rows: Sequence[TokenBatch], losses: Sequence[LossBatch] | None, layout: Layout) -> list[_Micro]:
    if layout.pp_size > 1:
        rows = same_length(list(rows), multiples(1, layout.cp_size, False)[0])
    device, rank, size = layout.device, layout.cp_rank, layout.cp_size
    dtype = _chunk(chunks[0]).config.params_dtype
    micros = []
    for i, row in enumerate(rows):
        share = share_of(row, rank, size)
        packed = pack_row(row.cu_seqlens, row.position_ids, device, row.prefix, dtype, rank, size)
        micros.append(
            _Micro(
                token_ids=row.token_ids[share.positions][None].to(device),
                position_ids=packed.position_ids[None],
                packed=packed,
                rows=share.rows.to(device),
                targets=row.targets[share.scored].to(device),
                scored=share.scored.to(device),
                num_scored=len(row.rows),
                loss_batch=None if losses is None else losses[i],
            )
        )
    return micros


def _chunk(module) -> ActorModel:
    """The model inside megatron's data-parallel wrapper, or the model itself."""
    return getattr(module, "module", module)


def _hidden(module, micro: _Micro) -> Tensor:
    with cpu_device.plain_torch():
        return module(
            input_ids=micro.token_ids,
            position_ids=micro.position_ids,
            attention_mask=None,
            packed_seq_params=micro.packed,
        )


def _log_probs(model: ActorModel, hidden: Tensor, micro: _Micro, head: Head) -> tuple[Tensor, Tensor]:
    """(log-probs [S], entropy [S]) of the row's scored positions, on every context-parallel rank."""
    log_probs, entropy = _own_log_probs(model, hidden, micro, head)
    if model.config.context_parallel_size == 1:
        return log_probs, entropy
    both = torch.stack([log_probs, entropy])
    both = gather_scored(both, micro.scored, micro.num_scored, parallel_state.get_context_parallel_group())
    return both[0], both[1]


def _own_log_probs(model: ActorModel, hidden: Tensor, micro: _Micro, head: Head) -> tuple[Tensor, Tensor]:
    """(log-probs [S_own], entropy [S_own]); see `output_log_probs` for the memory they take."""
    weight, weight_grad = weight_and_buffer(model.output_weight())
    if head.gather_rows:
        return output_log_probs(head_rows(model, hidden, micro.rows), weight, micro.targets, head, weight_grad)
    assert len(micro.rows.unique()) == len(micro.rows), "a row that predicts several tokens has to be gathered"
    targets = torch.zeros_like(micro.token_ids[0])
    targets[micro.rows] = micro.targets
    every_row = torch.arange(len(targets), device=targets.device)
    states = head_rows(model, hidden, every_row)
    log_probs, entropy = output_log_probs(states, weight, targets, head, weight_grad)
    return log_probs[micro.rows], entropy[micro.rows]


def output_log_probs(
    states: Tensor, weight: Tensor, targets: Tensor, head: Head, weight_grad: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(log-probs [S], entropy [S]) of hidden states [S, H]; logits take at most `max_logits_bytes` at any time.

    Without a gradient they are made in row chunks. With one they are kept for the backward pass, which puts their
    gradient in their place (fault C13); where they would not fit, tiles of them are made twice instead. The weight's
    gradient is added to `weight_grad` float32, where there is one.
    """
    settings = dict(
        temperature=head.temperature,
        vocab_size=head.vocab_size,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
    )
    num_fitting = max(1, head.max_logits_bytes // (states.element_size() * weight.shape[0]))
    if torch.is_grad_enabled() and len(states) > num_fitting:
        return ops.linear_logprob(states, weight, targets, weight_grad=weight_grad, **settings)
    if weight_grad is not None:
        logits = accumulate.linear(states, weight, weight_grad)
        return ops.logprob_entropy(logits, targets, overwrite_logits=True, **settings)
    if torch.is_grad_enabled():
        num_fitting = max(1, len(states))
    parts = [
        ops.logprob_entropy(
            states[i : i + num_fitting] @ weight.t(), targets[i : i + num_fitting], overwrite_logits=True, **settings
        )
        for i in range(0, max(1, len(states)), num_fitting)
    ]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def _run(chunks, micros: list[_Micro], step, forward_only: bool) -> list:
    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(micros) for _ in chunks],
        model=list(chunks),
        num_microbatches=len(micros),
        # Of whole rows: megatron-core divides it by the context-parallel ranks.
        seq_length=micros[0].token_ids.shape[1] * parallel_state.get_context_parallel_world_size(),
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


def _from_last_stage(tensor: Tensor) -> Tensor:
    """The same tensor on every rank of the model replica: that of the last stage's first TP rank."""
    group = parallel_state.get_model_parallel_group()
    if group.size() == 1:
        return tensor
    ranks = dist.get_process_group_ranks(group)
    tp_size = parallel_state.get_tensor_model_parallel_world_size()
    # Ranks of a replica are ordered stage by stage, TP ranks innermost.
    dist.broadcast(tensor, src=ranks[-tp_size], group=group)
    return tensor


def _scores_of_all(outputs: Sequence[Tensor], rows: Sequence[TokenBatch], layout: Layout) -> Tensor:
    """The last stage's [2, S] of every micro-batch as one tensor [2, sum S] on the CPU of every rank."""
    both = torch.zeros(2, sum(len(row.rows) for row in rows), device=layout.device)
    if layout.is_last_stage:
        both = torch.cat(list(outputs), dim=1).contiguous()
    return _from_last_stage(both).cpu()


def score_pass(chunks, rows: Sequence[TokenBatch], head: Head, layout: Layout) -> Tensor:
    """Log-probs and entropies of all scored positions of `rows`, in order, without a gradient.

    Returns:
        Log-probs and entropies [2, sum S], float32 on the CPU, the same on every rank of the replica.
    """

    def step(iterator, module):
        micro = next(iterator)
        hidden = _hidden(module, micro)
        if not _chunk(module).post_process:
            return hidden, None
        with cpu_device.plain_torch():
            both = torch.stack(_log_probs(_chunk(module), hidden, micro, head))
        return both, lambda output, non_loss_data: output

    for chunk in chunks:
        chunk.eval()
    with cpu_device.plain_torch():
        micros = _micros(chunks, rows, None, layout)
    with torch.no_grad():
        outputs = _run(chunks, micros, step, forward_only=True)
    for chunk in chunks:
        chunk.train()
    return _scores_of_all(outputs, rows, layout)


def update_pass(
    chunks,
    rows: Sequence[TokenBatch],
    losses: Sequence[LossBatch],
    loss_fn: LossFn,
    num_metrics: int,
    head: Head,
    layout: Layout,
) -> tuple[Tensor, Tensor | None]:
    """Accumulates the gradients of the summed loss.

    Returns:
        (summed loss and metrics [1 + M] over all ranks; log-probs and entropies [2, sum S] as `score_pass` gives them
        where the loss has no old log-probs, else None).
    """
    scores_too = losses[0].old_log_probs is None

    def step(iterator, module):
        micro = next(iterator)
        hidden = _hidden(module, micro)
        if not _chunk(module).post_process:
            return hidden, None
        with cpu_device.plain_torch():
            log_probs, entropy = _log_probs(_chunk(module), hidden, micro, head)
        scores = torch.stack([log_probs.detach(), entropy.detach()]) if scores_too else None

        def loss_func(output: Tensor):
            with cpu_device.plain_torch():
                loss, metrics = loss_fn(output, micro.loss_batch)
                report = torch.cat([loss.detach()[None].double(), metrics.detach().double()])
            return loss, torch.ones((), dtype=torch.int, device=output.device), (report, scores)

        return log_probs, loss_func

    with cpu_device.plain_torch():
        micros = _micros(chunks, rows, losses, layout)
    outputs = _run(chunks, micros, step, forward_only=False)
    total = torch.zeros(1 + num_metrics, dtype=torch.float64, device=layout.device)
    if layout.is_last_stage:
        total = torch.stack([report for report, _ in outputs]).sum(0)
    _from_last_stage(total)
    data_parallel_reduce(layout)(total, "sum")
    if not scores_too:
        return total.cpu(), None
    return total.cpu(), _scores_of_all([scores for _, scores in outputs], rows, layout)
