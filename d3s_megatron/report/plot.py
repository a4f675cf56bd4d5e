"""One picture of a run: what was learned, what was kept, and how the policy moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PANELS = (
    ("reward and held-out accuracy", ("reward", "eval/pass@1", "eval/pass@8")),
    ("kept share", ("kept_share", "kept_token_share", "sur")),
    ("entropy (nats)", ("entropy", "entropy_kept")),
    ("KL to the first weights", ("kl",)),
    ("gradient norm", ("grad_norm",)),
    ("advantage variance", ("advantage_variance_all", "advantage_variance_kept")),
)


def plot_run(rows: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Draws the log's rows to a PNG; a curve without a value is left out."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(13, 7), layout="constrained")
    for axis, (heading, names) in zip(axes.flat, PANELS, strict=True):
        for name in names:
            points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
            if points:
                few = name.startswith("eval/")
                axis.plot(*zip(*points, strict=True), marker="o" if few else None, lw=2 if few else 1.2, label=name)
        axis.set_title(heading, fontsize=10)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        if len(axis.lines) > 1:
            axis.legend(fontsize=8)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
