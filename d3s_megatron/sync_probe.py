"""After a weight sync: does every engine give the trainer's log-probs? Looked at before a rollout is spent (fault G04).

Every engine answers the same few prompts of the training data, a few tokens each; the trainer scores these answers. A
checksum says that a server read the bytes that were sent; this says that they became the model that the trainer has.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
import torch.distributed as dist

from d3s_megatron.actor.megatron_actor import MegatronActor
from d3s_megatron.actor.parallel import Layout, data_parallel_reduce
from d3s_megatron.config import RunConfig
from d3s_megatron.rollout import RolloutEngine, Sampling, make_requests
from d3s_megatron.types import Prompt, Rollout, Sample

# (prompts, tokens of each answer): the first takes less than a hundredth of a usual step's rollouts; where it finds
# something, the second decides, since in bfloat16 one unlikely token may differ by more than a nat.
PROBES = ((2, 8), (8, 32))

# Nats a token on average. With equal weights an 8 x 32 probe was at most 0.05 with vLLM in bfloat16, any token 3e-5 in
# float32 (docs/rollouts.md). An engine that is one ordinary step behind is below both: only more steps show.
EXACT, ROUNDED = 0.01, 0.1

Answer = tuple[str, tuple[int, ...], tuple[int, ...], tuple[float, ...]]  # engine, prompt, answer, its log-probs


def tolerance(config: RunConfig) -> float:
    """Nats a token on average: `rollout.probe_tolerance`, or what the types of engine and trainer allow."""
    exact = config.rollout.dtype == config.actor.dtype == "float32"
    return config.rollout.probe_tolerance or (EXACT if exact else ROUNDED)


def check_sync(
    engine: RolloutEngine,
    actor: MegatronActor,
    prompts: Sequence[Prompt],
    config: RunConfig,
    layout: Layout,
    after: str,
) -> dict[str, float]:
    """The mean difference as a row for the log, {"sync_mismatch": nats a token}; a collective over all ranks.

    Args:
        prompts: of the training data; the first ones are used, more of them where the first two are in doubt.
        after: which sync it was, for the message.

    Raises:
        RuntimeError: an engine differs by more than the tolerance; the worst is named.
    """
    limit = tolerance(config)
    for num_prompts, num_tokens in PROBES:
        sampling = Sampling(
            config.rollout.temperature, min(num_tokens, config.rollout.max_new_tokens)
        )  # no top-p, top-k
        requests = make_requests(prompts[:num_prompts], 1, config.train.seed, step=-1)
        asked = engine.ask_each(requests, sampling)
        answers = _of_all_ranks([_answer(name, layout, rollout) for name, rollout in asked])
        names = sorted({name for name, *_ in answers})
        sums = _differences(answers, names, actor, layout)
        means = sums[:, 1] / sums[:, 0].clamp(min=1)
        if bool((means <= limit).all()):
            return {"sync_mismatch": float(sums[:, 1].sum() / sums[:, 0].sum().clamp(min=1))}
    worst = int(means.nan_to_num(nan=float("inf")).argmax())
    raise RuntimeError(
        f"{after}: log-probs of trainer and {names[worst]} differ by {float(means[worst]):.3g} nats a token, above the "
        f"tolerance {limit:g} (rollout.probe_tolerance): the engine did not take the weights it was sent, or computes "
        "another model; no rollout was made with it"
    )


def _answer(name: str, layout: Layout, rollout: Rollout) -> Answer:
    where = f"rollout server {name}" if name else f"the engine of rank {layout.rank}"
    return where, rollout.request.prompt.token_ids, rollout.token_ids, rollout.log_probs


def _of_all_ranks(mine: list[Answer]) -> list[Answer]:
    parts: list[list[Answer]] = [[]] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    return list(chain.from_iterable(parts))


def _differences(answers: Sequence[Answer], names: Sequence[str], actor: MegatronActor, layout: Layout) -> torch.Tensor:
    """[engines, 2] float64: tokens, and their summed absolute differences; each replica scores its share of answers."""
    mine = answers[layout.dp_rank :: layout.dp_size]
    samples = [Sample(i, prompt, ids, log_probs, advantage=0.0) for i, (_, prompt, ids, log_probs) in enumerate(mine)]
    sums = torch.zeros(len(names), 2, dtype=torch.float64)
    for (name, *_, log_probs), score in zip(mine, actor.score(samples, with_reference=False), strict=True):
        difference = (score.old_log_probs - torch.tensor(log_probs)).abs().double()
        sums[names.index(name)] += torch.tensor([len(difference), float(difference.sum())], dtype=torch.float64)
    return data_parallel_reduce(layout)(sums, "sum")
