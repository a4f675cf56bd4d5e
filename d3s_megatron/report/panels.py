"""The curves that a report draws: what stands together, and what each series of the log means."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Panel:
    """One picture; of its series the first is drawn solid, the others dashed."""

    title: str
    series: tuple[tuple[str, str], ...]  # (name in the log, meaning)
    scale: str = "linear"  # or log


PANELS = (
    Panel("Reward", (("reward", "mean of all rollouts"),)),
    Panel(
        "Held-out accuracy and pass@k",
        (("eval/pass@1", "pass@1"), ("eval/pass@8", "pass@8"), ("eval/pass@32", "pass@32")),
    ),
    Panel("Response length (tokens)", (("response_length", "all"), ("response_length_kept", "kept rollouts"))),
    Panel(
        "Entropy (nats)",
        (("entropy", "scored tokens"), ("entropy_kept", "kept tokens"), ("probe/entropy", "probe: all rollouts")),
    ),
    Panel(
        "KL",
        (("kl", "to the first weights"), ("policy_kl", "of the step's updates"), ("probe/kl", "probe: all rollouts")),
    ),
    Panel("Sample usefulness rate (SUR)", (("sur", "training set"), ("sur_all", "whole batch"))),
    Panel("Kept share", (("kept_share", "rollouts"), ("kept_token_share", "tokens of kept rollouts"))),
    Panel("Gradient norm", (("grad_norm", "before clipping"),)),
    Panel("Advantage variance", (("advantage_variance_kept", "kept"), ("advantage_variance_all", "all"))),
    Panel(
        "Engine and trainer mismatch",
        (("mismatch_mean", "mean of abs(log-prob difference)"), ("mismatch_max", "largest")),
        "log",
    ),
    Panel("Clipped share", (("clip_fraction", "of kept tokens"),)),
    Panel("Seconds a step", (("time/step", "all stages"),)),
)
SERIES = frozenset(name for panel in PANELS for name, _ in panel.series)
