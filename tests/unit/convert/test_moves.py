"""Byte moves between two grids of the same tensor: any cut on either side, any dtype, in bands of any size."""

import os
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from d3s_megatron.convert.checkpoint import moves
from d3s_megatron.convert.checkpoint.blocks import Block
from d3s_megatron.convert.checkpoint.disk import Reader, Writer
from d3s_megatron.convert.parallel import stage_layers


def grid(file, rows, columns, dtype, row_cuts, column_cuts):
    """Blocks of a tensor cut evenly, one after the other in a file."""
    blocks, offset = [], 0
    for i in range(row_cuts):
        for j in range(column_cuts):
            height, width = rows // row_cuts, columns // column_cuts
            span = (i * height, (i + 1) * height), (j * width, (j + 1) * width)
            blocks.append(Block("t", dtype, *span, file, offset, width * dtype.itemsize))
            offset += height * width * dtype.itemsize
    return blocks


def store(blocks, whole):
    return b"".join(
        whole[slice(*b.rows), slice(*b.columns)].to(b.dtype).contiguous().view(torch.uint8).numpy().tobytes()
        for b in blocks
    )


cuts = st.sampled_from([1, 2, 4])


@settings(max_examples=60, deadline=None)
@given(
    split=st.sampled_from(["rows to columns", "columns to rows", "rows to rows"]),
    source_cuts=cuts,
    target_cuts=cuts,
    source_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    target_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    band=st.sampled_from([1, 64, 2**20]),
    kernel=st.booleans(),
    direct=st.booleans(),
)
def test_any_grid_to_any_grid(
    tmp_path_factory, split, source_cuts, target_cuts, source_dtype, target_dtype, band, kernel, direct
):
    folder = tmp_path_factory.mktemp("moves")
    before, after = split.split(" to ")
    # Column cuts stand against whole rows, as between Megatron and Hugging Face.
    source_grid = (
        (source_cuts, 1) if before == "rows" and after == "rows" else (1, source_cuts if before == "columns" else 1)
    )
    target_grid = (target_cuts, 1) if before == after else (1, target_cuts if after == "columns" else 1)
    rows, columns = 8, 12
    whole = torch.arange(rows * columns).view(rows, columns).float()
    sources = grid(folder / "source", rows, columns, source_dtype, *source_grid)
    targets = grid(Path("target"), rows, columns, target_dtype, *target_grid)
    (folder / "source").write_bytes(store(sources, whole))
    (folder / "target").write_bytes(bytes(whole.numel() * target_dtype.itemsize))
    patch = pytest.MonkeyPatch()
    patch.setattr(moves, "BAND_BYTES", max(band, 4))
    patch.setattr(moves, "COPY_BYTES", max(band, 4))
    if not kernel:
        patch.delattr(os, "copy_file_range")
    try:
        with closing(Reader(direct)) as reader, closing(Writer(folder, direct)) as writer:
            for task in moves.plan(sources, targets):
                moves.run_task(task, reader, writer)
    finally:
        patch.undo()
    assert (folder / "target").read_bytes() == store(targets, whole)


def test_parts_that_are_missing_or_twice_there_are_named():
    source, target = (grid(Path(name), 8, 12, torch.float32, 2, 1) for name in ("source", "target"))
    with pytest.raises(ValueError, match="t is missing"):
        moves.plan(source[:1], target)
    with pytest.raises(ValueError, match="t is stored twice"):
        moves.plan(source + source[:1], target)


def test_row_ranges_are_plain_copies():
    tasks = moves.plan(grid(Path("a"), 8, 12, torch.float32, 1, 1), grid(Path("b"), 8, 12, torch.float32, 4, 1))
    assert [task.kind for task in tasks] == ["copy"] * 4


def test_layers_of_uneven_stages():
    assert stage_layers(7, 3) == [[0, 1, 2], [3, 4], [5, 6]]
    assert stage_layers(8, 2, vpp=2) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    for layers, pp, vpp in ((80, 4, 5), (28, 3, 2), (5, 5, 1)):
        assert sorted(sum(stage_layers(layers, pp, vpp), [])) == list(range(layers))
    with pytest.raises(ValueError, match="cannot fill"):
        stage_layers(3, 4)
