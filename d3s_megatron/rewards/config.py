"""What a run says about its reward."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class RewardConfig:
    """How answers are judged."""

    kind: str = "math_verify"
    """"math_verify" (last box, compared as mathematics), "exact" (stripped text), "mixture", or "module:function"."""

    mixture: dict[str, float] = field(default_factory=dict)
    """For kind "mixture": weight of each part, by kind, as in {math_verify: 0.9, "my_rewards:short": 0.1}."""

    num_workers: int = 2
    """Worker processes of each rank that judge answers side by side (not used by "exact")."""

    deadline_seconds: float = 5.0
    """Wall seconds one answer may take in all, its one retry included; then its status is timeout."""

    memory_limit_mb: int = 2048
    """Address space of one worker process in MiB; 0 for no limit (a function of your own may load large libraries)."""

    def __post_init__(self) -> None:
        if self.kind not in ("math_verify", "exact", "mixture") and not _is_import_path(self.kind):
            raise ValueError(
                f"rewards.kind is {self.kind!r}: choose math_verify, exact, mixture, or a function as module:function"
            )
        if (self.kind == "mixture") != bool(self.mixture):
            raise ValueError(
                f"rewards.mixture is {self.mixture} with rewards.kind {self.kind!r}: weights belong to kind mixture, "
                "which needs at least one"
            )
        for part, weight in self.mixture.items():
            if part not in ("math_verify", "exact") and not _is_import_path(part):
                raise ValueError(
                    f"rewards.mixture has a part {part!r}: a part is math_verify, exact, or a module:function"
                )
            if not abs(weight) < float("inf"):
                raise ValueError(f"rewards.mixture[{part!r}] is {weight}: a weight is a finite number")
        if self.num_workers < 1:
            raise ValueError(f"rewards.num_workers is {self.num_workers}: at least 1 is needed")
        if not 0 < self.deadline_seconds < float("inf"):
            raise ValueError(f"rewards.deadline_seconds is {self.deadline_seconds}: give a positive number of seconds")
        if self.memory_limit_mb != 0 and self.memory_limit_mb < 256:
            raise ValueError(
                f"rewards.memory_limit_mb is {self.memory_limit_mb}: a worker needs at least 256, or 0 for no limit"
            )


def _is_import_path(kind: str) -> bool:
    module, colon, function = kind.partition(":")
    return bool(colon) and all(part.isidentifier() for part in module.split(".")) and function.isidentifier()
