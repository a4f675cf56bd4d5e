"""A Megatron tensor, or one rank's shard of it, as ranges of Hugging Face tensors.

One description serves reading (shards.py), splitting back, and moving bytes without a tensor in between: every piece
but a column cut is a contiguous run of bytes in its file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from d3s_megatron.convert.names import hf_shape, rule_of
from d3s_megatron.convert.parallel import check_tp
from d3s_megatron.convert.shape import ModelShape


@dataclass(frozen=True)
class Piece:
    """Rows [start, stop) of one Hugging Face tensor, or of zeros where `hf_name` is None; columns where cut."""

    hf_name: str | None
    start: int
    stop: int
    columns: tuple[int, int] | None = None

    @property
    def rows(self) -> int:
        """Number of rows this piece adds to the shard."""
        return self.stop - self.start


def pieces(
    shape: ModelShape, megatron_name: str, tp_rank: int = 0, tp_size: int = 1, padded_vocab: int | None = None
) -> list[Piece]:
    """Pieces of one rank's shard, to be stacked along the first dimension in this order.

    `padded_vocab` is the global number of rows of the embedding (default: the vocabulary itself). With the default
    rank and size this is the whole tensor. ValueError where the model does not divide by `tp_size`.
    """
    check_tp(shape, tp_size)
    if not 0 <= tp_rank < tp_size:
        raise ValueError(f"tensor parallel rank {tp_rank} is outside 0..{tp_size - 1}")
    rule = rule_of(shape, megatron_name)
    if rule.layout == "vocab":
        whole = _vocabulary(shape, rule.hf[0], padded_vocab or shape.vocab_size)
        return list(_row_share(whole, tp_rank, tp_size))
    if rule.layout == "qkv":
        return list(_row_share(_interleaved(shape, rule.hf), tp_rank, tp_size))
    if rule.layout == "gate_up":
        share = shape.ffn_size // tp_size
        return [Piece(name, tp_rank * share, (tp_rank + 1) * share) for name in rule.hf]
    (name,) = rule.hf
    rows, *columns = hf_shape(shape, name)
    if rule.layout == "columns":
        share = columns[0] // tp_size
        cut = (tp_rank * share, (tp_rank + 1) * share) if tp_size > 1 else None
        return [Piece(name, 0, rows, cut)]
    return [Piece(name, 0, rows)]


def _vocabulary(shape: ModelShape, name: str, padded: int) -> list[Piece]:
    if padded < shape.vocab_size:
        raise ValueError(f"padded vocabulary {padded} is smaller than vocab_size {shape.vocab_size}")
    real = Piece(name, 0, shape.vocab_size)
    return [real, Piece(None, 0, padded - shape.vocab_size)] if padded > shape.vocab_size else [real]


def _interleaved(shape: ModelShape, names: tuple[str, ...]) -> list[Piece]:
    q, k, v = names
    dim, queries = shape.head_dim, shape.num_heads // shape.num_kv_heads * shape.head_dim
    found = []
    for group in range(shape.num_kv_heads):
        found.append(Piece(q, group * queries, (group + 1) * queries))
        found += [Piece(name, group * dim, (group + 1) * dim) for name in (k, v)]
    return found


def _row_share(whole: list[Piece], rank: int, size: int) -> Iterator[Piece]:
    """The part of `whole` in this rank's even share of the rows."""
    total = sum(piece.rows for piece in whole)
    if total % size:
        raise ValueError(f"{total} rows do not divide by tensor parallel size {size}: pad the vocabulary to a multiple")
    low, high = rank * total // size, (rank + 1) * total // size
    at = 0
    for piece in whole:
        start, stop = max(low, at), min(high, at + piece.rows)
        if start < stop:
            yield Piece(piece.hf_name, piece.start + start - at, piece.start + stop - at)
        at += piece.rows
