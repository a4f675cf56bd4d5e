"""A real GPTModel of every family, alone in its process: its parameter names, and its logits against transformers'.

Run by test_megatron_model.py; prints one JSON object per model. A process of its own, since megatron-core keeps its
groups globally and wants `torch.cuda.current_device` replaced where there is no GPU.
"""

import json
import sys
from dataclasses import replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from transformers import AutoConfig, AutoModelForCausalLM

from d3s_megatron.actor.config import ActorConfig
from d3s_megatron.actor.model import transformer_config
from d3s_megatron.convert import megatron_names, read_shape, rope_inv_freq, shard_from_hf
from tests.unit.convert.builders import VARIANTS, tiny_config

PADDED = 12


def megatron_model(shape):
    model = GPTModel(
        replace(  # for the layers of megatron-core itself
            transformer_config(shape, ActorConfig()), use_te_activation_func=False, gradient_accumulation_fusion=False
        ),
        get_gpt_layer_local_spec(qk_layernorm=shape.qk_norm, normalization="RMSNorm"),
        vocab_size=PADDED,
        max_sequence_length=shape.max_positions,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        share_embeddings_and_output_weights=shape.tied,
    )
    model.rotary_pos_emb.inv_freq = rope_inv_freq(shape)
    return model.eval()


def main(store):
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)
    for family, changes in VARIANTS:
        config = tiny_config(family, **changes)
        shape = read_shape(config)
        torch.manual_seed(0)
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).eval()
        for parameter in theirs.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        state = theirs.state_dict()
        if shape.tied:
            del state["lm_head.weight"]
        ours = megatron_model(shape)
        with torch.no_grad():
            for name, parameter in ours.named_parameters():
                parameter.copy_(shard_from_hf(shape, name, 0, 1, PADDED, state.__getitem__))
            ids, mask = torch.arange(9).view(1, 9) % 7, torch.ones(9, 9).tril().lt(0.5)[None, None]
            logits = ours(ids, torch.arange(9).view(1, 9), mask)[..., : shape.vocab_size]
            difference = (logits - theirs(ids).logits).abs().max().item()
        names = sorted(name for name, _ in ours.named_parameters())
        print(json.dumps([family, names == sorted(megatron_names(shape)), difference, logits.abs().max().item()]))


if __name__ == "__main__":
    main(sys.argv[1])
