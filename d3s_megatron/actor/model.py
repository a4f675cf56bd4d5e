"""A megatron-core GPTModel in the shape of a Hugging Face folder, one chunk per pipeline stage of this rank."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from d3s_megatron.actor import cpu_device
from d3s_megatron.actor.attention import PackedDotProductAttention, PackedRotaryEmbedding
from d3s_megatron.actor.config import ActorConfig
from d3s_megatron.actor.norm import RMSNorm
from d3s_megatron.actor.parallel import Layout
from d3s_megatron.convert import ModelShape, check_tp, padded_vocab_size, rope_inv_freq

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def check_shape(shape: ModelShape, config: ActorConfig) -> None:
    """ValueError where the model does not divide over the layout; needs no process group (faults B10, B14)."""
    check_tp(shape, config.tensor_model_parallel_size)
    pp = config.pipeline_model_parallel_size
    if shape.num_layers % pp:
        raise ValueError(
            f"actor.pipeline_model_parallel_size is {pp}, but the model's {shape.num_layers} layers do not divide "
            f"by it: use a divisor of {shape.num_layers}"
        )


def transformer_config(shape: ModelShape, config: ActorConfig) -> TransformerConfig:
    """The megatron-core configuration of a Qwen2-, Qwen3-, Llama- or Mistral-shaped model."""
    dtype = DTYPES[config.dtype]
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        qk_layernorm=shape.qk_norm,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        sequence_parallel=config.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        use_cpu_initialization=cpu_device.needed(),
        perform_initialization=False,  # every weight comes from the folder; see weights.py
        calculate_per_token_loss=True,  # the loss arrives divided by its global Z, so ranks and micro-batches add up
        # Fused kernels of Apex and Transformer Engine: never needed.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )


def block_spec(shape: ModelShape, config: TransformerConfig) -> TransformerBlockSubmodules:
    """megatron-core's local layers of this stage, with attention over packed rows and our RMSNorm in them."""
    layer = get_gpt_layer_local_spec(qk_layernorm=shape.qk_norm, normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedDotProductAttention
    if shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=RMSNorm)


class ActorModel(GPTModel):
    """A GPTModel whose last stage returns hidden states, so that the output layer runs on chosen rows only."""

    def _postprocess(self, hidden_states: Tensor, *args, **kwargs) -> Tensor:
        return hidden_states

    def output_weight(self) -> Tensor:
        """This rank's rows of the output layer [V_tp, H], tied or not."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


def build_model(shape: ModelShape, config: ActorConfig, layout: Layout) -> ActorModel:
    """This rank's stage, weights not yet set; call it inside `cpu_device.as_cpu`."""
    check_shape(shape, config)
    core_config = transformer_config(shape, config)
    model = ActorModel(
        config=core_config,
        transformer_layer_spec=block_spec(shape, core_config),
        vocab_size=padded_vocab_size(shape.vocab_size, config.vocab_padding_multiple, layout.tp_size),
        max_sequence_length=shape.max_positions,
        pre_process=layout.pp_rank == 0,
        post_process=layout.is_last_stage,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        parallel_output=True,
    )
    model.rotary_pos_emb = PackedRotaryEmbedding(rope_inv_freq(shape))
    _mark_shards(model)
    return model.to(device=layout.device, dtype=DTYPES[config.dtype])


def _mark_shards(model: ActorModel) -> None:
    """Says which weights are shards; megatron-core does so only where it also fills them with random numbers.

    Without the mark the gradient norm counts a sharded weight on one rank only, and clipping is wrong under TP.
    """
    dims = {ColumnParallelLinear: 0, VocabParallelEmbedding: 0, RowParallelLinear: 1}
    for module in model.modules():
        for kind, dim in dims.items():
            weight = getattr(module, "weight", None)
            if isinstance(module, kind) and weight is not None and not hasattr(weight, "tensor_model_parallel"):
                tensor_parallel.set_tensor_model_parallel_attributes(weight, True, dim, 1)


def head_rows(model: ActorModel, hidden: Tensor, rows: Tensor) -> Tensor:
    """Hidden states of the scored positions.

    Args:
        hidden: [T, 1, H], or [T / TP, 1, H] under sequence parallelism.
        rows: [S] positions in the whole row.

    Returns:
        [S, H]; its gradient is summed over the TP ranks on the way back, as each holds a part of the vocabulary.
    """
    hidden = hidden.squeeze(1)
    if model.config.sequence_parallel:
        hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
    else:
        hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden)
    return hidden[rows]
