"""Sizes that tensor parallelism imposes: padding of the vocabulary, and which degrees divide a model."""

from __future__ import annotations

from d3s_megatron.convert.shape import ModelShape


def padded_vocab_size(vocab_size: int, multiple: int, tp: int) -> int:
    """Smallest multiple of `multiple` x `tp` that holds the vocabulary: 151936, 128, 2 -> 152064.

    The result is already global; it is never multiplied by `tp` again (fault B05).
    """
    for name, value in (("vocab_size", vocab_size), ("multiple", multiple), ("tp", tp)):
        if value < 1:
            raise ValueError(f"{name} is {value}: expected 1 or more")
    step = multiple * tp
    return -(-vocab_size // step) * step


def check_tp(shape: ModelShape, tp: int) -> None:
    """ValueError where the model cannot be cut into `tp` tensor-parallel ranks (fault B14).

    Fewer KV heads than ranks are fine where they divide `tp`: Megatron then gathers the projection of a group.
    """
    if tp < 1:
        raise ValueError(f"tensor parallel size is {tp}: expected 1 or more")
    for name, value in (("num_attention_heads", shape.num_heads), ("intermediate_size", shape.ffn_size)):
        if value % tp:
            raise ValueError(
                f"{name} {value} does not divide by tensor parallel size {tp}: choose a divisor of {value}"
            )
    if shape.num_kv_heads % tp and tp % shape.num_kv_heads:
        raise ValueError(
            f"num_key_value_heads {shape.num_kv_heads} is neither a multiple nor a divisor of tensor parallel size "
            f"{tp}: choose a size that divides {shape.num_kv_heads}, or a multiple of it"
        )
    rows = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    if rows % tp:
        raise ValueError(f"{rows} rows of the query, key, value projection do not divide by tensor parallel size {tp}")


def stage_layers(num_layers: int, pp: int, vpp: int = 1) -> list[list[int]]:
    """Layers of each pipeline stage: consecutive chunks, the earlier ones larger where it is uneven (7, 3 -> 3, 2, 2).

    With `vpp` chunks a stage holds every pp-th chunk, as in Megatron's interleaved schedule. Each layer lies on
    exactly one stage (fault B10).
    """
    for name, value in (("pp", pp), ("vpp", vpp)):
        if value < 1:
            raise ValueError(f"{name} is {value}: expected 1 or more")
    chunks = pp * vpp
    if num_layers < chunks:
        raise ValueError(f"{num_layers} layers cannot fill {pp} pipeline stages of {vpp} chunks: lower pp or vpp")
    stages: list[list[int]] = [[] for _ in range(pp)]
    first = 0
    for chunk in range(chunks):
        length = num_layers // chunks + (chunk < num_layers % chunks)
        stages[chunk % pp] += range(first, first + length)
        first += length
    return stages
