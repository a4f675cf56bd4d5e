"""Bytes of one rank: exact for what an instantiated model holds, modelled for what a training step adds.

Letters: T tokens of a micro-batch, S its scored rows, w bytes of a weight (2 or 4), H hidden size, F MLP size.
"""

from __future__ import annotations

from dataclasses import dataclass

from d3s_megatron.convert import ModelShape, padded_vocab_size
from d3s_megatron.convert.parallel import stage_layers

# Rectangles of samples hold at most a factor of two of padding (actor/attention.py); this much was seen on answers
# of one prompt mix, whose lengths vary fourfold.
PADDING = 1.25
SYNC_BUCKET_BYTES = 256 * 2**20  # what actor/weights.py gathers at a time
NORM = 4  # bytes: RMSNorm works in float32 whatever the weights are


@dataclass(frozen=True)
class Layout:
    """How a model is cut, in the words of ActorConfig."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    sequence_parallel: bool = False
    distributed_optimizer: bool = True
    recompute: str = "none"  # none, selective, full
    weight_bytes: int = 2
    tokens: int = 16384  # of a micro-batch, over all context-parallel ranks
    max_logits_bytes: int = 512 * 2**20
    vocab_multiple: int = 128
    cp: int = 1

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.cp * self.dp


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank of a stage."""

    weights: int
    gradients: int
    optimizer: int
    reference: int
    activations: int
    logits: int
    engine: int
    sync: int

    @property
    def total(self) -> int:
        return sum(vars(self).values())


def layer_parameters(shape: ModelShape, tp: int) -> int:
    """Parameters of one layer on one tensor-parallel rank, as megatron-core allocates them."""
    hidden, kv = shape.hidden_size, shape.num_kv_heads * shape.head_dim
    qkv_rows = (shape.num_heads * shape.head_dim + 2 * kv) // tp
    ffn = shape.ffn_size // tp
    count = qkv_rows * hidden + hidden * (shape.num_heads * shape.head_dim // tp) + 3 * hidden * ffn + 2 * hidden
    if shape.qkv_bias or shape.linear_bias:
        count += qkv_rows
    if shape.linear_bias:
        count += 2 * hidden + 2 * ffn
    return count + (2 * shape.head_dim if shape.qk_norm else 0)


def stage_parameters(shape: ModelShape, layout: Layout, stage: int) -> int:
    """Parameters of one rank of a pipeline stage, from 0; a tied head on another stage than the embedding counts."""
    layers = len(stage_layers(shape.num_layers, layout.pp, layout.vpp)[stage])
    vocab = padded_vocab_size(shape.vocab_size, layout.vocab_multiple, layout.tp) // layout.tp
    count = layers * layer_parameters(shape, layout.tp)
    if stage == 0:
        count += vocab * shape.hidden_size
    if stage == layout.pp - 1:
        count += shape.hidden_size  # the last norm
        if not shape.tied or layout.pp > 1:
            count += vocab * shape.hidden_size
    return count


def gradient_bytes(parameters: int) -> int:
    """Gradients are float32 whatever the weights are."""
    return 4 * parameters


def optimizer_bytes(parameters: int, layout: Layout) -> int:
    """Adam's two moments, and main weights in float32 beside bfloat16 ones; split over DP where so configured.

    The distributed optimizer's padding, at most a few hundred elements a bucket, is left out.
    """
    each = 8 if layout.weight_bytes == 4 else 12
    return each * (-(-parameters // (layout.dp * layout.cp)) if layout.distributed_optimizer else parameters)


def layer_activation_bytes(shape: ModelShape, layout: Layout, tokens: int, padding: float = PADDING) -> int:
    """What one layer keeps on a rank for its backward pass, with the packed attention of actor/attention.py.

    `padding` is the size of the attention's rectangles over the tokens in them, 1 for samples of one length.
    """
    width, tp = layout.weight_bytes, layout.tp
    split = tp if layout.sequence_parallel else 1
    hidden, cp = shape.hidden_size, layout.cp
    if layout.recompute == "full":
        return round(tokens * hidden * width / split / cp)
    q = shape.num_heads * shape.head_dim / tp
    kv = max(1, shape.num_kv_heads / tp) * shape.head_dim
    norms = 2 * (2 * hidden * NORM + NORM) / split
    inputs = 2 * hidden * width / split  # of the two column-parallel GEMMs
    mlp = 3 * shape.ffn_size / tp * width  # what goes into SwiGLU, and what comes out of it
    rotary = 4 * shape.head_dim * width
    qk_norm = 0.0
    if shape.qk_norm:
        qk_norm = (2 * q + 2 * kv) * NORM + (shape.num_heads + shape.num_kv_heads) / tp * NORM
        if width == NORM:  # no copy to float32 is made: a view keeps the whole projection instead
            qk_norm += (q + kv) * width
    if layout.recompute == "selective":
        attention = (q + kv) * width  # queries and keys after the rotation
        if not (shape.qk_norm and width == NORM):
            attention += (q + 2 * kv) * width  # values: a view that keeps the whole projection, counted above otherwise
    else:
        # An early and a late chunk's queries read the keys of (2 cp + 1) / 2 cp samples, wherever those are.
        seen = cp + 0.5 if cp > 1 else 1
        attention = ((2 * q + 2 * kv * seen) * width + shape.num_heads / tp * 4) * padding
    return round(tokens / cp * (norms + inputs + mlp + rotary + qk_norm + attention + q * width))


def activation_bytes(shape: ModelShape, layout: Layout, stage: int, num_microbatches: int) -> int:
    """Everything a stage keeps while its micro-batches are in flight (one forward, one backward at a time).

    Stage s holds pp - s micro-batches; interleaving holds more of them by (1 + (pp - 1) / (pp * vpp)). Under context
    parallelism a micro-batch has the masks of its late chunks beside, as large as those of one sample that fills it.
    """
    layers = len(stage_layers(shape.num_layers, layout.pp, layout.vpp)[stage])
    in_flight = min(layout.pp - stage, num_microbatches)
    one = layers * layer_activation_bytes(shape, layout, layout.tokens)
    if layout.cp > 1:
        chunk = layout.tokens / (2 * layout.cp)
        one += round(chunk * chunk * (2 * layout.cp + 1) * layout.weight_bytes)
    more = 1 + (layout.pp - 1) / (layout.pp * layout.vpp) if layout.vpp > 1 else 1
    held = round(one * in_flight * more)
    if layout.recompute == "full":  # the layer at hand is made again as a whole
        held += layer_activation_bytes(shape, _without_recompute(layout), layout.tokens)
    if stage == layout.pp - 1:
        held += layout.tokens // layout.cp * shape.hidden_size * (2 * NORM + 2 * layout.weight_bytes)
    return held


def _without_recompute(layout: Layout) -> Layout:
    return Layout(**{**vars(layout), "recompute": "none"})


def logit_bytes(shape: ModelShape, layout: Layout, stage: int, scored_share: float = 1.0) -> int:
    """Logits of the scored rows on the last stage, bounded by actor.max_logits_mb."""
    if stage < layout.pp - 1:
        return 0
    vocab = padded_vocab_size(shape.vocab_size, layout.vocab_multiple, layout.tp) // layout.tp
    return min(layout.max_logits_bytes, round(layout.tokens / layout.cp * scored_share * vocab * layout.weight_bytes))


def model_parameters(shape: ModelShape) -> int:
    """Parameters of the Hugging Face folder, nothing padded."""
    count = shape.num_layers * layer_parameters(shape, 1) + shape.hidden_size
    return count + shape.vocab_size * shape.hidden_size * (1 if shape.tied else 2)


def kv_bytes_per_token(shape: ModelShape, width: int = 2) -> int:
    """Keys and values of one token over all layers."""
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * width


def engine_bytes(shape: ModelShape, engine_tp: int, answers: int, tokens_per_answer: int) -> int:
    """A rollout engine on one of its `engine_tp` ranks: bfloat16 weights and the cache of the answers at once."""
    cache = answers * tokens_per_answer * kv_bytes_per_token(shape)
    return (2 * model_parameters(shape) + cache) // engine_tp


def stage_memory(
    shape: ModelShape,
    layout: Layout,
    stage: int,
    num_microbatches: int,
    engine: int,
    with_reference: bool = False,
) -> Memory:
    """All bytes of one rank of a stage; `engine` are those of the rollout engine beside it."""
    parameters = stage_parameters(shape, layout, stage)
    return Memory(
        weights=parameters * layout.weight_bytes,
        gradients=gradient_bytes(parameters),
        optimizer=optimizer_bytes(parameters, layout),
        reference=parameters * layout.weight_bytes if with_reference else 0,
        activations=activation_bytes(shape, layout, stage, num_microbatches),
        logits=logit_bytes(shape, layout, stage),
        engine=engine,
        sync=min(SYNC_BUCKET_BYTES, 2 * model_parameters(shape)),
    )
