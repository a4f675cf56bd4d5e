"""Two outcomes of the same update: what differs, the first thing first, and what that says of the cause."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# In the order of the step: the first that differs is where the cause is.
STAGES = ("kept ids", "log-probs", "entropy", "kept tokens", "loss", "grad norm", "gradients", "copies")

# A gradient this small beside the largest one is rounding noise (a key's bias hardly matters to the softmax).
NOISE = 1e-3


@dataclass(frozen=True)
class Difference:
    """How far one quantity is off; `error` is relative, for log-probs and entropies absolute in nats."""

    stage: str  # one of STAGES
    name: str  # the parameter's name for gradients, else the stage
    error: float
    sign: int = 0  # 1 or -1 where every value is off to that side


def compare(got: dict[str, Any], want: dict[str, Any]) -> list[Difference]:
    """Every quantity with its error, in the order of STAGES; gradients parameter by parameter."""
    found = [
        Difference("kept ids", "kept ids", float(not torch.equal(got["kept_ids"], want["kept_ids"]))),
        _per_token("log-probs", got["log_probs"], want["log_probs"]),
        _per_token("entropy", got["entropy"], want["entropy"]),
        Difference("kept tokens", "kept tokens", float((got["kept_tokens"] != want["kept_tokens"]).sum())),
        Difference("loss", "loss", relative(got["loss"][:, 0], want["loss"][:, 0])),
        Difference("grad norm", "grad norm", relative(got["grad_norm"], want["grad_norm"])),
    ]
    largest = max(float(grad.norm()) for grad in want["gradients"].values())
    for name, grad in want["gradients"].items():
        error = relative(got["gradients"][name], grad, floor=NOISE * largest)
        found.append(Difference("gradients", name, error))
    found.append(Difference("copies", "copies of one weight on several ranks", got["spread"]))
    return found


def relative(got: Tensor, want: Tensor, floor: float = 1e-30) -> float:
    """abs(got - want) over abs(want), as vectors; what is not a number is infinitely wrong."""
    error = float((got.double() - want.double()).norm() / max(floor, float(want.double().norm())))
    return error if error == error else float("inf")


def _per_token(stage: str, got: Tensor, want: Tensor) -> Difference:
    off = (got - want)[(got != 0) | (want != 0)]
    if not off.isfinite().all():
        return Difference(stage, stage, float("inf"))
    sign = 1 if (off > 0).all() else -1 if (off < 0).all() else 0
    return Difference(stage, stage, float(off.abs().max()) if len(off) else 0.0, sign)


def worst_by_stage(differences: Sequence[Difference]) -> dict[str, Difference]:
    """The largest error of each stage."""
    return {stage: max((d for d in differences if d.stage == stage), key=lambda d: d.error) for stage in STAGES}


def beyond(differences: Sequence[Difference], tolerance: float) -> list[Difference]:
    """What differs by more than the tolerance, the first first."""
    return [difference for difference in differences if difference.error > tolerance]


def likely_cause(wrong: Sequence[Difference]) -> str:
    """What the pattern of differences says; see faults.py for faults that make each of them."""
    stages = {difference.stage for difference in wrong}
    first = wrong[0]
    if first.stage == "kept ids":
        return "rewards, advantages or sample selection are not the same on every rank"
    if first.stage == "log-probs":
        if "entropy" not in stages:
            return "labels are wrong while the distribution is right: do they come from across a packed border?"
        if first.sign == -1:
            return "every log-prob is too low: do padded vocabulary columns take part in the softmax?"
        return "the forward pass differs"
    if first.stage == "entropy":
        return "the entropy is wrong while log-probs are right"
    if first.stage == "kept tokens":
        return "token selection is not taken over all ranks, or scores are within rounding of the threshold"
    if first.stage == "loss":
        return "log-probs are right: the loss is not divided by the token count of all ranks"
    if first.stage == "copies":
        return "the step is not the same on every rank: gradients, or a tied embedding, are not in step"
    factor = _factor(wrong)
    if factor:
        return f"every gradient is {factor} times the right one: it is summed over ranks that each have the whole of it"
    if first.stage == "grad norm" and "gradients" not in stages:
        return "gradients are right: a shard is left out of the norm, or counted twice"
    return "the forward pass is right: a reduction has no backward, or gradients are not summed over their ranks"


def _factor(wrong: Sequence[Difference]) -> int | None:
    """By how many times the norm and most gradients are too large, where it is one whole number."""
    errors = [difference.error for difference in wrong if difference.stage in ("grad norm", "gradients")]
    if wrong[0].stage != "grad norm" or not math.isfinite(errors[0]):
        return None
    excess = round(errors[0])
    num_alike = sum(abs(error - excess) < 1e-2 for error in errors)  # the smallest ones are noise
    return excess + 1 if excess and 2 * num_alike > len(errors) else None
