"""Logits of transformers' model and of the Megatron actor's model on the same random tokens.

Apart from the rest of the tool because it alone needs both libraries, and memory for two models in float32.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from megatron.core import dist_checkpointing
from torch import Tensor
from transformers import AutoModelForCausalLM

from d3s_megatron.actor import cpu_device
from d3s_megatron.actor.attention import pack_row
from d3s_megatron.actor.config import ActorConfig
from d3s_megatron.actor.model import build_model, head_rows
from d3s_megatron.actor.parallel import init_parallel, shutdown
from d3s_megatron.actor.weights import load_weights
from d3s_megatron.convert import HFFolder, read_shape
from d3s_megatron.convert.checkpoint.job import run
from d3s_megatron.convert.checkpoint.jobs import companions_of, export_job
from d3s_megatron.convert.checkpoint.torch_dist import DistCheckpoint, is_dist_checkpoint

NUM_TOKENS = 64


def compare_logits(first: Path, second: Path, companions: str | None = None) -> float:
    """Largest absolute difference of the logits, in float32, of transformers on one folder and Megatron on the other.

    Transformers takes the Hugging Face folder of the two (an export of the first where both are Megatron's), the
    actor's model the Megatron checkpoint (or, where both are Hugging Face's, the second folder).
    """
    if is_dist_checkpoint(first) and not is_dist_checkpoint(second):
        first, second = second, first
    with tempfile.TemporaryDirectory() as scratch:
        if is_dist_checkpoint(first):
            run(export_job(first, Path(scratch) / "export", companions))
            first = Path(scratch) / "export"
        shape = read_shape(first)
        tokens = torch.randint(0, shape.vocab_size, (NUM_TOKENS,), generator=torch.Generator().manual_seed(0))
        theirs = hf_logits(first, tokens)
        ours = megatron_logits(second, tokens, companions)
    return (theirs - ours).abs().max().item()


@torch.no_grad()
def hf_logits(folder: Path, tokens: Tensor) -> Tensor:
    """Logits [T, V] float32 of transformers' model."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model(tokens[None]).logits[0].float()


@torch.no_grad()
def megatron_logits(folder: Path, tokens: Tensor, companions: str | None = None) -> Tensor:
    """Logits [T, V] float32 of the actor's model, one process, vocabulary padding cut off."""
    from_megatron = is_dist_checkpoint(folder)
    shape = read_shape(companions_of(DistCheckpoint(folder), companions) if from_megatron else folder)
    config = ActorConfig(dtype="float32")
    layout = init_parallel(config)
    try:
        with cpu_device.as_cpu():
            (model,) = chunks = build_model(shape, config, layout)
            model.eval()
            if from_megatron:
                wanted = {"model": model.sharded_state_dict(metadata=_metadata(folder))}
                loaded = dist_checkpointing.load(wanted, str(folder), strict="raise_unexpected")
                model.load_state_dict(loaded["model"])
            else:
                load_weights(chunks, HFFolder(folder), shape, config, layout)
            positions = torch.arange(len(tokens), device=layout.device)
            row = pack_row(torch.tensor([0, len(tokens)]), positions, layout.device)
            device_tokens = tokens[None].to(layout.device)
            hidden = model(device_tokens, positions[None], attention_mask=None, packed_seq_params=row)
            logits = head_rows(model, hidden, positions) @ model.output_weight().t()
        return logits[:, : shape.vocab_size].float().cpu()
    finally:
        shutdown()


def _metadata(folder: Path) -> dict:
    """How the checkpoint's keys are spelled: layers together, or one by one."""
    together = any(".layers.mlp." in key for key in DistCheckpoint(folder).stored)
    return {} if together else {"non_homogeneous_layers": True}
