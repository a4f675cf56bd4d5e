"""Short names of layouts, as the doctor's command line has them: tp2, tp2sp, pp2vpp2, cp2, tp2pp2dp2."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from d3s_megatron.actor.config import ActorConfig

SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
}
_NAME = re.compile(r"(?:(tp|pp|vpp|cp|dp)(\d+)|(sp))")


@dataclass(frozen=True)
class NamedLayout:
    """A layout, the number of processes it takes, and what ActorConfig has to say for it."""

    name: str
    num_processes: int
    actor: dict[str, Any]


def parse_layout(name: str) -> NamedLayout:
    """tp2sp -> two processes with sequence parallelism; ValueError where it is no such name."""
    parts = list(_NAME.finditer(name))
    kinds = [part[1] or part[3] for part in parts]
    if not parts or "".join(part[0] for part in parts) != name or len(set(kinds)) < len(kinds):
        raise ValueError(
            f"layout {name!r} is not understood: join tp, pp, vpp, cp, dp with a number, and sp, as in tp2sp"
        )
    sizes = {part[1]: int(part[2]) for part in parts if part[1]}
    actor: dict[str, Any] = {SIZES[kind]: size for kind, size in sizes.items() if kind in SIZES}
    if "sp" in kinds:
        actor["sequence_parallel"] = True
    num_processes = math.prod(size for kind, size in sizes.items() if kind != "vpp")
    return NamedLayout(name, num_processes, actor)


def parse_settings(given: Sequence[str]) -> dict[str, Any]:
    """["layers=transformer_engine"] -> {"layers": "transformer_engine"}; ValueError where the actor has no such one."""
    known = vars(ActorConfig())
    settings = {}
    for one in given:
        name, _, text = one.partition("=")
        value = yaml.safe_load(text)
        if name not in known or (known[name] is not None and type(value) is not type(known[name])):
            names = ", ".join(sorted(known))
            raise ValueError(f"--actor {one}: give NAME=VALUE with a value of its kind; names are {names}")
        settings[name] = value
    if settings.get("use_distributed_optimizer"):
        raise ValueError("--actor use_distributed_optimizer: no rank has whole gradients to compare, leave it out")
    return settings
