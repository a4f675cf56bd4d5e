"""One D3S update per job, from fixed rollouts; rank 0 saves what must not depend on the layout.

layout_worker.py JOBS.json      [{"model": folder, "out": file, "algorithm": name, "actor": {...ActorConfig}}]
"""

import json
import sys
from functools import partial
from pathlib import Path

import torch
from megatron.core import parallel_state

from d3s_megatron import stages
from d3s_megatron.actor.config import ActorConfig, OptimizerConfig
from d3s_megatron.actor.megatron_actor import MegatronActor
from d3s_megatron.actor.parallel import data_parallel_reduce, init_parallel, shutdown
from d3s_megatron.algorithms.config import AlgorithmConfig
from d3s_megatron.algorithms.recipes import amounts, make_loss, make_recipe
from d3s_megatron.rollout import Sampling, make_requests
from d3s_megatron.types import Prompt, Rollout, Verdict

NUM_PROMPTS, GROUP = 6, 8


class FixedEngine:
    """Answers that depend on the request alone: what differs afterwards, differs in the trainer."""

    def generate(self, requests, sampling):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        generator = torch.Generator().manual_seed(request.uid)
        length = int(torch.randint(1, 9, (), generator=generator))
        ids = tuple(torch.randint(0, 12, (length,), generator=generator).tolist())
        log_probs = tuple((-torch.rand(length, generator=generator)).tolist())
        return Rollout(request, ids, log_probs, "stop", str(request.uid))


class FixedReward:
    """Right for a third of the answers, unevenly over the groups."""

    def grade(self, items):
        return [Verdict(float((int(text) * 7919) % 11 < 4), "right") for text, _ in items]


def one_update(model: str, out: str, algorithm: str, actor: dict) -> None:
    config = ActorConfig(**actor)
    algorithm = AlgorithmConfig(
        name=algorithm,
        samples_per_prompt=GROUP,
        kept_per_prompt_init=4,
        kept_per_prompt_final=GROUP,
        token_share_init=0.3,
        kl_beta=0.05,
        num_minibatches=2,
    )
    layout = init_parallel(config)
    loss, recipe = make_loss(algorithm), make_recipe(algorithm)
    # AdamW makes a step of lr out of any gradient, however small; a larger eps keeps rounding noise small in it.
    optimizer = OptimizerConfig(lr=1e-3, eps=1e-4)
    actor = MegatronActor(model, config, optimizer, layout, 0.7, 10, with_reference=True)
    prompts = [Prompt(str(i), "", tuple(range(1, 3 + i)), "") for i in range(NUM_PROMPTS)]
    assert make_requests(prompts, GROUP, 5, 0)[-1].uid == NUM_PROMPTS * GROUP - 1
    rollouts = stages.generate(FixedEngine(), prompts, GROUP, Sampling(), 5, 0, layout)
    judged = stages.judge(rollouts, FixedReward(), "wrong", 5, 0, layout)
    chosen = amounts(algorithm, 0, 10)
    selected = recipe.apply(judged, chosen.num_kept)
    batch = stages.score(stages.redistribute(rollouts, selected, algorithm, layout), actor)
    select = partial(stages.select_tokens, recipe=recipe, amounts=chosen, experience=selected, layout=layout)
    batch = select(batch)
    results = stages.update(batch, actor, loss, algorithm, 8, stages.reselect_tokens(actor, select))

    # Kept tokens of all data-parallel ranks: one row a sample, by uid, padded with -1.
    kept_tokens = torch.zeros(NUM_PROMPTS * GROUP, 8, dtype=torch.int64)
    for sample, mask in zip(batch.samples, batch.keep, strict=True):
        kept_tokens[sample.uid, : len(mask)] = mask.long() + 1
    data_parallel_reduce(layout)(kept_tokens, "sum")
    weights = {name: tensor.clone() for name, tensor in actor.weights()}
    if layout.rank == 0:
        saved = {
            "kept_ids": selected.kept.nonzero().flatten(),
            "kept_tokens": kept_tokens,
            "loss": torch.stack([r.totals for r in results]),
            "grad_norm": torch.tensor([r.grad_norm for r in results]),
            "weights": weights,
        }
        torch.save(saved, out)
    parallel_state.destroy_model_parallel()


if __name__ == "__main__":
    for job in json.loads(Path(sys.argv[1]).read_text()):
        one_update(**job)
    shutdown()
