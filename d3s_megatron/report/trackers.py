"""Experiment trackers beside TensorBoard, each imported only where it is named: Weights & Biases, MLflow, trackio.

Addresses, keys and offline modes are theirs to know (WANDB_MODE, MLFLOW_TRACKING_URI, TRACKIO_DIR, ...). A run that is
resumed goes on in the same entry; OUTPUT_DIR/trackers.json says which that is.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

IDS_FILE = "trackers.json"
MOST_PARAMS = 100  # that MLflow takes in one call


class Tracker(Protocol):
    """What a run log writes to."""

    def log(self, values: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class Wandb:
    """Weights & Biases."""

    def __init__(self, project: str, name: str, settings: Mapping[str, Any], folder: Path, ids: dict[str, str]) -> None:
        wandb = importlib.import_module("wandb")
        known = {"id": ids["wandb"], "resume": "allow"} if "wandb" in ids else {}
        self._run = wandb.init(project=project, name=name, config=dict(settings), dir=str(folder), **known)
        ids["wandb"] = self._run.id

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """MLflow; "@" in a name becomes "_at_", as it takes none."""

    def __init__(self, project: str, name: str, settings: Mapping[str, Any], folder: Path, ids: dict[str, str]) -> None:
        self._mlflow = importlib.import_module("mlflow")
        self._mlflow.set_experiment(project)
        known = ids.get("mlflow")
        self._mlflow.start_run(run_id=known, run_name=None if known else name)
        if not known:
            ids["mlflow"] = self._mlflow.active_run().info.run_id
            params = [(key, str(value)[:500]) for key, value in settings.items()]
            for i in range(0, len(params), MOST_PARAMS):
                self._mlflow.log_params(dict(params[i : i + MOST_PARAMS]))

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._mlflow.log_metrics({key.replace("@", "_at_"): float(v) for key, v in values.items()}, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


class Trackio:
    """Hugging Face's trackio."""

    def __init__(self, project: str, name: str, settings: Mapping[str, Any], folder: Path, ids: dict[str, str]) -> None:
        self._trackio = importlib.import_module("trackio")
        name = ids.setdefault("trackio", name)
        self._trackio.init(project=project, name=name, config=dict(settings), resume="allow")

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._trackio.log(dict(values), step=step)

    def close(self) -> None:
        self._trackio.finish()


TRACKERS: dict[str, Callable[..., Tracker]] = {"wandb": Wandb, "mlflow": MLflow, "trackio": Trackio}


def check_installed(names: Sequence[str]) -> None:
    """ValueError where one of them is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ValueError(
                f"report.trackers names {name}, which is not installed: pip install {name}, or leave it out"
            )


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted name."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


class Trackers:
    """All that a run was told to write to."""

    def __init__(
        self, names: Sequence[str], project: str, name: str, settings: Mapping[str, Any], folder: Path, goes_on: bool
    ) -> None:
        """Args: name: of the run; settings: by dotted name; goes_on: continue the entries of an earlier process."""
        path = folder / IDS_FILE
        ids: dict[str, str] = json.loads(path.read_text()) if goes_on and path.exists() else {}
        self._all: list[Tracker] = [TRACKERS[which](project, name, settings, folder, ids) for which in names]
        if names:
            path.write_text(json.dumps(ids) + "\n")

    def log(self, row: Mapping[str, Any], step: int) -> None:
        """The numbers of a row; those that are not finite are left out."""
        numbers = {k: v for k, v in row.items() if isinstance(v, int | float) and k != "step" and math.isfinite(v)}
        for tracker in self._all:
            tracker.log(numbers, step)

    def close(self) -> None:
        """Ends the entries."""
        for tracker in self._all:
            tracker.close()
