"""The check of reference answers when a data set is loaded."""

from __future__ import annotations

from collections.abc import Sequence

from d3s_megatron.rewards.config import RewardConfig
from d3s_megatron.rewards.pool import WorkerPool

GOLD_JUDGE = "d3s_megatron.rewards.math_judge:judge_gold"


def check_golds(golds: Sequence[tuple[str, str]], config: RewardConfig | None = None) -> list[str]:
    """Ids of the (id, gold) pairs whose gold does not parse, so that no answer to them can ever be rewarded."""
    config = config or RewardConfig()
    pool = WorkerPool(GOLD_JUDGE, config.num_workers, config.deadline_seconds, config.memory_limit_mb)
    try:
        verdicts = pool.map([("", str(gold)) for _, gold in golds])
    finally:
        pool.close()
    return [id for (id, _), verdict in zip(golds, verdicts, strict=True) if verdict.status != "right"]
