"""Several runs in the same ranks, one after the other: `torchrun resume_worker.py JOBS.json`.

JOBS.json   [{"argv": the command line of d3s_megatron.train,
              "cut": {"run": folder, "step": number} to make train.output_dir from a finished run first, or null}]

Each rank writes RANK.json beside JOBS.json: the next random number after each run, for the test to compare.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from test_resume import cut

from d3s_megatron import train
from d3s_megatron.actor.config import ActorConfig
from d3s_megatron.actor.parallel import init_parallel, shutdown


def main(path: Path) -> None:
    rank = init_parallel(ActorConfig()).rank
    parallel_state.destroy_model_parallel()
    # Not the process group: joining it a second time after a save never ends.
    train.shutdown = parallel_state.destroy_model_parallel
    drawn = []
    for number, job in enumerate(json.loads(path.read_text())):
        if job["cut"] and rank == 0:
            out = Path(job["argv"][job["argv"].index("--train.output_dir") + 1])
            cut(Path(job["cut"]["run"]), out, job["cut"]["step"])
        dist.barrier()
        torch.manual_seed(number)
        torch.rand(1 + 4 * rank)  # each rank draws as many as no other does
        train.main(job["argv"])
        drawn.append(float(torch.rand(())))
    path.with_name(f"{rank}.json").write_text(json.dumps(drawn))
    shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
