"""The clipped policy loss with a token ratio (GRPO) or a sequence ratio (GSPO, token form), and the KL term.

    loss = - sum_t weight_t x min(w_t A_t, clip(w_t, 1 - low, 1 + high) A_t)  +  beta x sum_t kl_weight_t x kl_t

    token ratio     w_t = pi(y_t) / pi_old(y_t)                                            (method 1.1)
    sequence ratio  w_t = sg[s] x pi(y_t) / sg[pi(y_t)],  s = exp(mean_t log pi/pi_old)     (method 1.2)

The mean of s runs over the whole response, also where few of its tokens are kept: such batches carry all rows.
Gradients of the KL estimators as a loss: k2 has that of the KL on average, k3 that of the KL of the other direction,
k1 none (fault D13).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from d3s_megatron.types import LossBatch

# exp stays finite in float32 and far beyond every clip range (fault D11); NaN still passes through clamp.
MAX_LOG_RATIO = 20.0
MAX_LOG_SEQUENCE_RATIO = 10.0
MAX_KL = 10.0

METRICS = ("num_tokens", "num_clipped", "num_dual_clipped", "kl", "policy_kl", "ratio")


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, kind: str) -> Tensor:
    """Per token [S] the estimate of KL(pi || pi_ref) from samples of pi; natural log."""
    diff = (ref_log_probs - log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if kind == "k1":
        return -diff
    if kind == "k2":
        return diff**2 / 2
    return (torch.expm1(diff) - diff).clamp(max=MAX_KL)


def sequence_mean(values: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    """Mean over each sequence, given back at every one of its rows: [S] -> [S]."""
    total = values.new_zeros(num_sequences).index_add(0, sequence, values)
    count = values.new_zeros(num_sequences).index_add(0, sequence, torch.ones_like(values))
    return (total / count.clamp(min=1))[sequence]


@dataclass(frozen=True)
class PolicyLoss:
    """Called with (log-probs [S], LossBatch) it returns the summed loss and the sums of METRICS over kept tokens."""

    ratio: Literal["token", "sequence"]
    clip_low: float
    clip_high: float
    dual_clip: float | None
    kl_beta: float
    kl_kind: str

    @property
    def reads_all_tokens(self) -> bool:
        """True where dropped tokens are needed too, for the ratio of the whole response."""
        return self.ratio == "sequence"

    def __call__(self, log_probs: Tensor, batch: LossBatch) -> tuple[Tensor, Tensor]:
        old_log_probs = log_probs.detach() if batch.old_log_probs is None else batch.old_log_probs
        log_ratio = log_probs - old_log_probs
        if self.ratio == "sequence":
            own = log_probs - log_probs.detach()  # value 0, gradient that of the token
            mean = sequence_mean(log_ratio.detach(), batch.sequence, batch.num_sequences)
            ratio = (own + mean).clamp(max=MAX_LOG_SEQUENCE_RATIO).exp()
        else:
            ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        free = ratio * batch.advantages
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * batch.advantages
        surrogate = torch.minimum(free, clipped)
        dual = torch.zeros_like(surrogate, dtype=torch.bool)
        if self.dual_clip is not None:
            bound = self.dual_clip * batch.advantages
            dual = (batch.advantages < 0) & (surrogate < bound)
            surrogate = torch.where(dual, bound, surrogate)
        loss = -(batch.weights * surrogate).sum()

        kl = torch.zeros_like(log_probs)
        if batch.ref_log_probs is not None:
            kl = kl_estimate(log_probs, batch.ref_log_probs, self.kl_kind)
            if self.kl_beta:
                loss = loss + self.kl_beta * (batch.kl_weights * kl).sum()

        with torch.no_grad():
            keep = batch.keep
            per_token = (
                torch.ones_like(kl),
                (clipped < free).to(kl.dtype),
                dual.to(kl.dtype),
                kl,
                kl_estimate(old_log_probs, log_probs, "k3"),  # KL(old || new), from samples of old
                ratio,
            )
            metrics = torch.stack([torch.where(keep, values, 0).sum() for values in per_token])
        return loss, metrics
