"""A megatron-core GPTModel in the shape of a Hugging Face folder, one chunk per pipeline stage of this rank."""

from __future__ import annotations

import importlib.util
import warnings
from functools import partial
from typing import Any

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
from d3s_megatron.actor.attention import PackedDotProductAttention, PackedRotaryEmbedding, PackedRow, ThdAttention
from d3s_megatron.actor.config import ActorConfig
from d3s_megatron.actor.main_grad import Embedding
from d3s_megatron.actor.norm import RMSNorm
from d3s_megatron.actor.parallel import Layout, virtual_chunks
from d3s_megatron.actor.swiglu import SwiGlu
from d3s_megatron.convert import ModelShape, check_tp, padded_vocab_size, rope_inv_freq

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def check_shape(shape: ModelShape, config: ActorConfig) -> None:
    """ValueError where the model does not divide over the layout; needs no process group (faults B10, B14)."""
    check_tp(shape, config.tensor_model_parallel_size)
    pp, vpp = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    ends = [config.num_layers_in_first_pipeline_stage, config.num_layers_in_last_pipeline_stage]
    given = [num for num in ends if num is not None]
    left, stages = shape.num_layers - sum(given), pp - len(given)
    if not given and left % pp:
        raise ValueError(
            f"actor.pipeline_model_parallel_size is {pp}, but the model's {shape.num_layers} layers do not divide "
            f"by it: use a divisor of {shape.num_layers}, or give actor.num_layers_in_first_pipeline_stage or _last"
        )
    if left < stages or (left % stages if stages else left):
        raise ValueError(
            f"actor.num_layers_in_first_pipeline_stage {ends[0]} and actor.num_layers_in_last_pipeline_stage {ends[1]} "
            f"leave {left} of the model's {shape.num_layers} layers to {stages} stages, which must share them evenly"
        )
    for num in [*given, *([left // stages] if stages else [])]:
        if num % vpp:
            raise ValueError(
                f"actor.virtual_pipeline_model_parallel_size is {vpp}, but a stage has {num} layers: "
                f"use a divisor of {num}"
            )


def check_transformer_engine(config: ActorConfig) -> None:
    """ValueError where Transformer Engine is asked for and cannot run here."""
    wanted = [name for name in ("attention", "layers") if getattr(config, name) == "transformer_engine"]
    missing = []
    if importlib.util.find_spec("transformer_engine") is None:
        missing.append("Transformer Engine is not installed (pip install 'd3s_megatron[te]')")
    if cpu_device.needed():
        missing.append("there is no GPU")
    if wanted and missing:
        raise ValueError(f"actor.{wanted[0]} is transformer_engine, but {' and '.join(missing)}: give torch")


def fuses_weight_gradients(config: ActorConfig) -> bool:
    """Whether layers add weight gradients into the buffer: on a CPU always, else if wanted and possible (fault F02)."""
    if cpu_device.needed():
        return True  # by torch; see cpu_device.py
    if not config.gradient_accumulation_fusion:
        return False
    if importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None:
        warnings.warn(
            "actor.gradient_accumulation_fusion is off: it needs NVIDIA Apex's fused_weight_gradient_mlp_cuda "
            "(built from source; the apex on PyPI is another project)",
            stacklevel=2,
        )
        return False
    return True


ATTENTION = {"torch": PackedDotProductAttention, "transformer_engine": ThdAttention}
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


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
        add_bias_linear=shape.linear_bias,
        add_qkv_bias=shape.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=virtual_chunks(config),
        context_parallel_size=config.context_parallel_size,
        num_layers_in_first_pipeline_stage=config.num_layers_in_first_pipeline_stage,
        num_layers_in_last_pipeline_stage=config.num_layers_in_last_pipeline_stage,
        # Interleaved stages send both ways at once; between two ranks a batch of sends would mix up the directions.
        overlap_p2p_comm=virtual_chunks(config) is not None,
        batch_p2p_comm=virtual_chunks(config) is None,
        sequence_parallel=config.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        use_cpu_initialization=cpu_device.needed(),
        perform_initialization=False,  # every weight comes from the folder; see weights.py
        calculate_per_token_loss=True,  # the loss arrives divided by its global Z, so ranks and micro-batches add up
        # Fused kernels of Apex and Transformer Engine: never needed.
        gradient_accumulation_fusion=fuses_weight_gradients(config),
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        use_te_activation_func=True,  # whose place swiglu.py takes, without Transformer Engine
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **RECOMPUTE[config.recompute],
    )


def block_spec(
    shape: ModelShape, config: TransformerConfig, chunk: int | None, attention: type, layers: str
) -> TransformerBlockSubmodules:
    """megatron-core's local layers of one chunk, with attention over packed rows, norms and matrices of `layers`.

    Transformer Engine's norms stay apart from its matrices, so that parameters have the same names either way.
    """
    norm: type = RMSNorm
    layer = get_gpt_layer_local_spec(qk_layernorm=shape.qk_norm, normalization="RMSNorm")
    mlp = layer.submodules.mlp  # from 0.19 on a functools.partial
    mlp_parts = mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules
    mlp_parts.activation_func = SwiGlu
    parts = layer.submodules.self_attention.submodules
    parts.core_attention = attention
    if layers == "transformer_engine":
        from megatron.core.extensions import transformer_engine

        norm = transformer_engine.TENorm
        parts.linear_qkv = mlp_parts.linear_fc1 = transformer_engine.TEColumnParallelLinear
        parts.linear_proj = mlp_parts.linear_fc2 = transformer_engine.TERowParallelLinear
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
    if shape.qk_norm:
        parts.q_layernorm = parts.k_layernorm = norm
    num_layers = get_num_layers_to_build(config, vp_stage=chunk)
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=norm)


class ActorModel(GPTModel):
    """A GPTModel whose last stage returns hidden states, so that the output layer runs on chosen rows only."""

    def forward(self, *args, packed_seq_params: PackedRow, **kwargs) -> Tensor:
        """Hidden states [T_own, 1, H] of this chunk's last layer."""
        if isinstance(self.decoder.layers[0].self_attention.core_attention, PackedDotProductAttention):
            packed_seq_params = packed_seq_params.with_biases(self.config.params_dtype)
        return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)

    def _postprocess(self, hidden_states: Tensor, *args, **kwargs) -> Tensor:
        return hidden_states

    @property
    def first_layer(self) -> int:
        """Number of this chunk's first layer in the whole model, from 0."""
        return self.decoder.layers[0].layer_number - 1

    def output_weight(self) -> Tensor:
        """This rank's rows of the output layer [V_tp, H], tied or not."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


def build_model(shape: ModelShape, config: ActorConfig, layout: Layout) -> list[ActorModel]:
    """This rank's chunks of layers (one without interleaving), weights not yet set; call it inside `as_cpu`."""
    check_shape(shape, config)
    check_transformer_engine(config)
    core_config = transformer_config(shape, config)
    num_chunks = config.virtual_pipeline_model_parallel_size
    return [_build_chunk(shape, config, core_config, layout, i, num_chunks) for i in range(num_chunks)]


def _build_chunk(shape, config: ActorConfig, core_config, layout: Layout, chunk: int, num_chunks: int) -> ActorModel:
    vp_stage = chunk if num_chunks > 1 else None
    model = ActorModel(
        config=core_config,
        transformer_layer_spec=block_spec(shape, core_config, vp_stage, ATTENTION[config.attention], config.layers),
        vocab_size=padded_vocab_size(shape.vocab_size, config.vocab_padding_multiple, layout.tp_size),
        max_sequence_length=shape.max_positions,
        pre_process=layout.pp_rank == 0 and chunk == 0,
        post_process=layout.is_last_stage and chunk == num_chunks - 1,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        parallel_output=True,
        vp_stage=vp_stage,
    )
    model.rotary_pos_emb = PackedRotaryEmbedding(rope_inv_freq(shape))
    if model.pre_process:
        model.embedding.word_embeddings.__class__ = Embedding  # a layer spec has no place for it
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
        hidden: [T_own, 1, H], or [T_own / TP, 1, H] under sequence parallelism.
        rows: [S_own] positions among the T_own tokens of this rank (all, without context parallelism).

    Returns:
        [S_own, H]; its gradient is summed over the TP ranks on the way back, as each holds a part of the vocabulary.
    """
    hidden = hidden.squeeze(1)
    if model.config.sequence_parallel:
        hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
    else:
        hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden)
    return hidden[rows]
