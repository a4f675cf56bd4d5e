"""What training does with checkpoints, at one layout after the other; rank 0 writes down what the model then holds.

checkpoint_worker.py JOBS.json   [{"hf": folder, "actor": {...}, "load": torch_dist folder or null,
                                   "save": folder, "metadata": {...} or absent, "weights": file, "scores": file}]
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from safetensors.torch import save_file

from d3s_megatron.actor import cpu_device
from d3s_megatron.actor.checkpoint import begin_save
from d3s_megatron.actor.config import ActorConfig, OptimizerConfig
from d3s_megatron.actor.megatron_actor import MegatronActor
from d3s_megatron.actor.parallel import init_parallel, shutdown
from d3s_megatron.types import Sample

SAMPLE = Sample(0, (1, 2, 3), (4, 5, 6, 7), (0.0,) * 4, 1.0)


def one_job(job: dict) -> None:
    layout = init_parallel(ActorConfig(**job["actor"]))
    actor = MegatronActor(job["hf"], ActorConfig(**job["actor"]), OptimizerConfig(lr=1e-3), layout, 1.0, 10)
    (model,) = actor.chunks
    with cpu_device.as_cpu():
        metadata = job.get("metadata")
        if job.get("load"):
            for parameter in model.parameters():
                parameter.data.fill_(-1.0)  # whatever the loader leaves out shows
            wanted = {"model": model.sharded_state_dict()}
            loaded = dist_checkpointing.load(wanted, job["load"], strict="raise_unexpected")
            model.load_state_dict(loaded["model"])
        if layout.rank == 0:
            Path(job["save"]).mkdir()
        dist.barrier()
        if metadata:
            dist_checkpointing.save({"model": model.sharded_state_dict(metadata=metadata)}, job["save"])
        else:
            begin_save(actor, Path(job["save"]), step=7).finish()
    weights = {name: tensor.clone() for name, tensor in actor.weights()}
    log_probs = actor.score([SAMPLE])[0].old_log_probs
    if layout.rank == 0:
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, job["weights"])
        torch.save(log_probs, job["scores"])
    dist.barrier()
    # Not the process group: joining it a second time after a save never ends.
    parallel_state.destroy_model_parallel()


if __name__ == "__main__":
    for item in json.loads(Path(sys.argv[1]).read_text()):
        one_job(item)
    shutdown()
