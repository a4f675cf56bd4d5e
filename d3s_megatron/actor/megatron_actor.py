"""The Megatron actor: a policy that scores samples, takes optimizer steps and streams its weights out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_

from d3s_megatron.actor import cpu_device
from d3s_megatron.actor.config import ActorConfig, OptimizerConfig
from d3s_megatron.actor.context import multiples
from d3s_megatron.actor.model import DTYPES, ActorModel, build_model
from d3s_megatron.actor.offload import HostOffload
from d3s_megatron.actor.packing import fill_up, pack, split_rows
from d3s_megatron.actor.parallel import Layout, data_parallel_reduce
from d3s_megatron.actor.passes import Head, LossFn, score_pass, update_pass
from d3s_megatron.actor.weights import load_weights, replica_spread, weight_stream
from d3s_megatron.convert import HFFolder, read_shape
from d3s_megatron.types import LossBatch, Sample, Scores, TokenBatch


@dataclass(frozen=True)
class UpdateResult:
    """What one optimizer step did; `totals` are the loss and the metrics, summed over ranks and micro-batches."""

    totals: Tensor  # [1 + M] float64
    grad_norm: float  # before clipping; NaN where the step was not taken
    lr: float
    stepped: bool
    scores: tuple[Scores, ...] | None = None  # of the samples, where the loss had no old log-probs

    @staticmethod
    def skipped(lr: float, num_metrics: int) -> UpdateResult:
        """No step, as there was nothing to learn from."""
        return UpdateResult(torch.zeros(1 + num_metrics, dtype=torch.float64), math.nan, lr, stepped=False)


class MegatronActor:
    """A model on megatron-core with its optimizer; every method is a collective over all ranks.

    Args:
        model_path: a Hugging Face folder.
        temperature: that of the rollouts; log-probs and entropies are those of softmax(logits / temperature).
        num_optimizer_steps: length of the learning-rate schedule.
        with_reference: keep a frozen copy of the first weights and score it too.
    """

    def __init__(
        self,
        model_path: str,
        config: ActorConfig,
        optimizer: OptimizerConfig,
        layout: Layout,
        temperature: float,
        num_optimizer_steps: int,
        with_reference: bool = False,
    ) -> None:
        self.config, self.layout = config, layout
        self.shape = read_shape(model_path)
        self.head = Head(self.shape.vocab_size, temperature, config.max_logits_mb * 2**20, config.gather_rows)
        folder = HFFolder(model_path)
        with cpu_device.as_cpu():
            self.chunks = build_model(self.shape, config, layout)
            load_weights(self.chunks, folder, self.shape, config, layout)
            self.reference = None
            if with_reference:
                self.reference = [chunk.requires_grad_(False) for chunk in build_model(self.shape, config, layout)]
                load_weights(self.reference, folder, self.shape, config, layout)
            self.ddp = _wrap(self.chunks, config)
            self.optimizer = _make_optimizer(self.ddp, config, optimizer)
            self.scheduler = _make_scheduler(self.optimizer, optimizer, num_optimizer_steps)
            self.host = HostOffload(self.optimizer, self.ddp, config.dtype != "float32", layout.device)
            core_config = self.chunks[0].config  # all chunks have the same one
            core_config.finalize_model_grads_func = _finalize
            core_config.grad_scale_func = self.optimizer.scale_loss
            if config.overlap_grad_reduce:
                hooks = [chunk.no_sync for chunk in self.ddp]
                core_config.no_sync_func = hooks[0] if len(hooks) == 1 else hooks

    @property
    def model(self) -> ActorModel:
        """The only chunk of layers of this rank; ValueError where there are several."""
        if len(self.chunks) > 1:
            raise ValueError(
                f"actor.virtual_pipeline_model_parallel_size is {len(self.chunks)}: this rank has as many chunks of "
                "layers, which is not supported here; give 1"
            )
        return self.chunks[0]

    @property
    def lr(self) -> float:
        """Learning rate of the next optimizer step."""
        return self.optimizer.param_groups[0]["lr"]

    def score(self, samples: Sequence[Sample], with_reference: bool = True) -> list[Scores]:
        """Log-probs and entropies of every response token of this rank's samples, with no gradient.

        `with_reference` False leaves the first weights' log-probs out also where they are kept.
        """
        rows = self._rows(samples, None)
        with cpu_device.as_cpu():
            both = score_pass(self.ddp, rows, self.head, self.layout)
            ref = None
            if self.reference is not None and with_reference:
                ref, _ = score_pass(self.reference, rows, self.head, self.layout)
        return _by_sample(both, ref, rows, samples)

    def update(
        self,
        samples: Sequence[Sample],
        scored: Sequence[Tensor],
        loss_batches,
        loss_fn: LossFn,
        num_metrics: int,
    ) -> UpdateResult:
        """One optimizer step on this rank's samples.

        Args:
            samples: this rank's share of the mini-batch.
            scored: per sample the response tokens [L] bool whose log-probs the loss reads.
            loss_batches: TokenBatch -> LossBatch for those rows; without old log-probs all response tokens must be
                scored, and the result has their log-probs and entropies.
            loss_fn: the loss, already divided by its global normaliser.
            num_metrics: length of the metrics vector that `loss_fn` returns.
        """
        rows, losses = self._rows_to_train(samples, scored, loss_batches)
        with cpu_device.as_cpu():
            totals, grad_norm, both = self._backward(rows, losses, loss_fn, num_metrics)
            scores = None if both is None else tuple(_by_sample(both, None, rows, samples))
            lr = self.lr
            if not math.isfinite(grad_norm):  # a step would write it into every weight
                return UpdateResult(totals, grad_norm, lr, stepped=False, scores=scores)
            stepped = _step(self.optimizer, grad_norm)
            self.scheduler.step(increment=1)
        return UpdateResult(totals, grad_norm, lr, stepped=stepped, scores=scores)

    def gradient_norm(
        self, samples: Sequence[Sample], scored: Sequence[Tensor], loss_batches, loss_fn: LossFn, num_metrics: int
    ) -> float:
        """The global norm of the gradient that `update` would step along; weights and optimizer stay as they are."""
        rows, losses = self._rows_to_train(samples, scored, loss_batches)
        with cpu_device.as_cpu():
            return self._backward(rows, losses, loss_fn, num_metrics)[1]

    def _rows_to_train(
        self, samples: Sequence[Sample], scored: Sequence[Tensor], loss_batches
    ) -> tuple[list[TokenBatch], list[LossBatch]]:
        rows = self._rows(samples, scored)
        return rows, [loss_batches(row) for row in rows]

    def _backward(
        self, rows: Sequence[TokenBatch], losses: Sequence[LossBatch], loss_fn: LossFn, num_metrics: int
    ) -> tuple[Tensor, float, Tensor | None]:
        """(totals, gradient norm, scores where they were asked for), and the gradients in their buffers.

        The norm is NaN where the loss is not finite.
        """
        self.host.restore()
        for chunk in self.ddp:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        totals, scores = update_pass(self.ddp, rows, losses, loss_fn, num_metrics, self.head, self.layout)
        if not math.isfinite(totals[0]):
            return totals, math.nan, scores
        self.optimizer.prepare_grads()
        return totals, float(self.optimizer.get_grad_norm()), scores

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor) of every weight, on every rank; draw it to the end.

        It ends the training phase of a step: with actor.offload_between_phases, what only `update` needs then goes
        to the host, until the next update.
        """
        yield from weight_stream(self.chunks, self.shape, self.layout)
        if self.config.offload_between_phases and not cpu_device.needed():
            self.host.offload()

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """As `weights`, the float32 gradients that the last update left behind, clipped where it clipped them."""
        if self.config.use_distributed_optimizer:
            raise ValueError("actor.use_distributed_optimizer is true: no rank has whole gradients, switch it off")

        def main_grad(parameter: Any) -> Tensor:
            return parameter.main_grad

        return weight_stream(self.chunks, self.shape, self.layout, main_grad)

    def replica_spread(self) -> float:
        """Largest difference between copies of one weight on several ranks; 0 where all is well."""
        return replica_spread(self.chunks, self.shape, self.layout)

    def _rows(self, samples: Sequence[Sample], scored: Sequence[Tensor] | None) -> list[TokenBatch]:
        """This rank's rows, as many as the busiest data-parallel rank has."""
        of_samples, multiple = multiples(self.layout.tp_size, self.layout.cp_size, self.config.sequence_parallel)
        rows = pack(
            samples,
            self.config.max_tokens_per_microbatch,
            multiple,
            scored,
            truncate=self.config.truncate_samples,
            share_prompts=self.config.shares_prompts,
            sample_multiple=of_samples,
        )
        most = torch.tensor([max(1, len(rows))])
        data_parallel_reduce(self.layout)(most, "max")
        num = int(most)
        if self.config.virtual_pipeline_model_parallel_size > 1:  # interleaving works through whole groups of PP rows
            num += -num % self.layout.pp_size
        return fill_up(rows, num, multiple)


def _by_sample(both: Tensor, ref: Tensor | None, rows: Sequence[TokenBatch], samples: Sequence[Sample]) -> list[Scores]:
    """Log-probs and entropies [2, sum S] of all response tokens, and the reference's [sum S], by sample."""
    lengths = [len(sample.response_ids) for sample in samples]
    by_sample = [split_rows(values, rows, lengths) for values in both]
    refs = [None] * len(samples) if ref is None else split_rows(ref, rows, lengths)
    return [Scores(*parts) for parts in zip(*by_sample, refs, strict=True)]


def _wrap(chunks: Sequence[ActorModel], config: ActorConfig) -> list[DistributedDataParallel]:
    """megatron's gradient buffers and their reduction; the buffers are float32 for any type of weights."""
    return [
        DistributedDataParallel(
            config=chunk.config,
            ddp_config=DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                use_distributed_optimizer=config.use_distributed_optimizer,
                overlap_grad_reduce=config.overlap_grad_reduce,
            ),
            module=chunk,
            disable_bucketing=i > 0,  # later chunks finish while earlier ones still run: one reduction each
        )
        for i, chunk in enumerate(chunks)
    ]


def _finalize(model, num_tokens=None, **kwargs) -> None:
    """megatron's gradient reduction without its division: the loss carries its global normaliser already."""
    finalize_model_grads(model, None, **kwargs)


def _make_optimizer(ddp: list[DistributedDataParallel], config: ActorConfig, optimizer: OptimizerConfig):
    dtype = DTYPES[config.dtype]
    megatron_optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=optimizer.lr,
            min_lr=optimizer.min_lr,
            weight_decay=optimizer.weight_decay,
            adam_beta1=optimizer.beta1,
            adam_beta2=optimizer.beta2,
            adam_eps=optimizer.eps,
            clip_grad=optimizer.clip_grad,
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=config.use_distributed_optimizer,
        ),
        ddp,
    )
    for group in megatron_optimizer.param_groups:
        # torch's AdamW, where neither Transformer Engine nor Apex is there: one call for all weights.
        if "fused" in group:
            group["fused"] = True
    return megatron_optimizer


def _step(optimizer: Any, grad_norm: float) -> bool:
    """Clips by the norm that is known already, where megatron-core's own step would prepare and measure all again."""
    for part in optimizer.chained_optimizers:
        if 0 < part.config.clip_grad < grad_norm:
            clip_grads_with_norm_(part.get_parameters(), part.config.clip_grad, torch.tensor(grad_norm))
    with cpu_device.plain_torch():
        return bool(optimizer.step_with_ready_grads())


def _make_scheduler(megatron_optimizer, config: OptimizerConfig, num_steps: int) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
        megatron_optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.warmup_steps,
        lr_decay_steps=max(num_steps, config.warmup_steps + 1),
        lr_decay_style=config.lr_schedule,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=max(num_steps, 1),
        wd_incr_style="constant",
    )
