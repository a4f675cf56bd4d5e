"""One whole D3S update per job, from answers and rewards that are fixed: what differs afterwards, differs in the actor.

torchrun --nproc-per-node N -m d3s_megatron.doctor.update JOBS.json        a list of Jobs, all on N processes
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from d3s_megatron import stages
from d3s_megatron.actor.config import ActorConfig, OptimizerConfig
from d3s_megatron.actor.megatron_actor import MegatronActor
from d3s_megatron.actor.parallel import Layout, data_parallel_reduce, init_parallel, leave_layout, shutdown
from d3s_megatron.algorithms.config import AlgorithmConfig
from d3s_megatron.algorithms.recipes import amounts, make_loss, make_recipe
from d3s_megatron.doctor.faults import injected
from d3s_megatron.learner import Learner
from d3s_megatron.rewards import Reward, grade_rollouts
from d3s_megatron.rollout import Sampling
from d3s_megatron.types import Prompt, Request, Rollout, Verdict

NUM_PROMPTS, GROUP, LONGEST = 6, 8, 12
TEMPERATURE = 0.7
STEPS = 10  # of the schedule; one is run


@dataclass(frozen=True)
class Job:
    """One update and where its outcome is written."""

    model: str
    out: str
    actor: dict[str, Any] = field(default_factory=dict)
    algorithm: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    fault: str | None = None


class FixedEngine:
    """Answers that depend on the request alone."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """Token ids and log-probs drawn from the request's uid."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Request) -> Rollout:
        generator = torch.Generator().manual_seed(request.uid)
        length = int(torch.randint(1, LONGEST + 1, (), generator=generator))
        ids = tuple(torch.randint(0, self.vocab_size, (length,), generator=generator).tolist())
        log_probs = tuple((-torch.rand(length, generator=generator)).tolist())
        return Rollout(request, ids, log_probs, "stop", str(request.uid))


class FixedReward(Reward):
    """Right for a third of the answers, unevenly over the groups."""

    def _grade(self, items: list[tuple[str, str]]) -> list[Verdict]:
        # The uid, which is the answer's text, decides.
        return [Verdict(float((int(text) * 7919) % 11 < 4), "right") for text, _ in items]


def prompts(vocab_size: int) -> list[Prompt]:
    """Prompts of 2 to 7 tokens."""
    return [
        Prompt(str(i), "", tuple((1 + 5 * i + j) % vocab_size for j in range(2 + i)), "") for i in range(NUM_PROMPTS)
    ]


def algorithm_config(changes: dict[str, Any]) -> AlgorithmConfig:
    """D3S with shares of its first steps, so that something is dropped."""
    settings: dict[str, Any] = dict(
        name="d3s",
        samples_per_prompt=GROUP,
        kept_per_prompt_init=4,
        kept_per_prompt_final=GROUP,
        token_share_init=0.3,
        kl_beta=0.0,
        rollout_correction="none",  # the fixed answers' log-probs are made up
    )
    return AlgorithmConfig(**(settings | changes))


def one_update(job: Job) -> dict[str, Any]:
    """The outcome of a job, the same on every rank but for what only the first one gathers; a collective."""
    config, algorithm = ActorConfig(**job.actor), algorithm_config(job.algorithm)
    optimizer = OptimizerConfig(**({"lr": 1e-3, "eps": 1e-4, "clip_grad": 0.0} | job.optimizer))
    layout = init_parallel(config)
    loss, recipe = make_loss(algorithm), make_recipe(algorithm)
    actor = MegatronActor(job.model, config, optimizer, layout, TEMPERATURE, STEPS, with_reference=loss.kl_beta > 0)
    vocab_size = actor.shape.vocab_size
    rollouts = stages.generate(FixedEngine(vocab_size), prompts(vocab_size), GROUP, Sampling(), 5, 0, layout)
    verdicts = grade_rollouts(FixedReward(), rollouts)
    learner = Learner(algorithm, recipe, loss, actor, LONGEST)
    learned = learner.step(5, 0, amounts(algorithm, 0, STEPS), rollouts, verdicts)
    outcome = {
        "kept_ids": learned.selected.kept.nonzero().flatten(),
        "advantages": learned.selected.advantages,
        **_by_uid(learned.batch, layout),
        "loss": torch.stack([result.totals for result in learned.updates]),
        "grad_norm": torch.tensor([result.grad_norm for result in learned.updates]),
        "spread": actor.replica_spread(),
        "weights": _drawn(actor.weights(), layout),
    }
    if not config.use_distributed_optimizer:
        outcome["gradients"] = _drawn(actor.gradients(), layout)
    leave_layout()
    return outcome


def _by_uid(batch: stages.Batch, layout: Layout) -> dict[str, Tensor]:
    """What is known of every token, of all data-parallel ranks: one row a rollout, by uid."""
    num = NUM_PROMPTS * GROUP
    values = {name: torch.zeros(num, LONGEST) for name in ("log_probs", "entropy", "kept_tokens")}
    for sample, scores, mask in zip(batch.samples, batch.scored(), batch.keep, strict=True):
        values["log_probs"][sample.uid, : len(mask)] = scores.old_log_probs
        values["entropy"][sample.uid, : len(mask)] = scores.entropy
        values["kept_tokens"][sample.uid, : len(mask)] = mask.float() + 1  # 0: no token, 1: dropped, 2: kept
    reduce = data_parallel_reduce(layout)
    return {name: reduce(table, "sum") for name, table in values.items()}


def _drawn(stream: Iterator[tuple[str, Tensor]], layout: Layout) -> dict[str, Tensor]:
    """The stream as a dictionary on the first rank; the others only take part."""
    found = {}
    for name, tensor in stream:
        if layout.rank == 0:
            found[name] = tensor.cpu().clone()
    return found


def main(file: str) -> None:
    """Runs the jobs of a file; rank 0 saves the outcomes."""
    for entry in json.loads(Path(file).read_text()):
        job = Job(**entry)
        with injected(job.fault):
            outcome = one_update(job)
        if outcome["weights"]:
            torch.save(outcome, job.out)
    shutdown()


def write_jobs(jobs: Sequence[Job], file: Path) -> Path:
    """The file that `main` reads."""
    file.write_text(json.dumps([asdict(job) for job in jobs]))
    return file


if __name__ == "__main__":
    main(sys.argv[1])
