"""Bytes from and to disk: any offset and length, past the page cache, from it, and where direct access is refused."""

import os
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from d3s_megatron.convert.checkpoint import disk
from d3s_megatron.convert.checkpoint.disk import ALIGN, Reader, Writer, reserve

SIZE = 5 * ALIGN + 77
edges = st.one_of(st.integers(0, SIZE), st.sampled_from([0, 1, ALIGN - 1, ALIGN, ALIGN + 1, 2 * ALIGN, SIZE]))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("disk") / "source"
    path.write_bytes(np.random.default_rng(0).bytes(SIZE))
    return path


def evict(path):
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


@settings(deadline=None, max_examples=60)
@given(ends=st.tuples(edges, edges), direct=st.booleans(), warm=st.booleans())
def test_any_range_reads(source, ends, direct, warm):
    low, high = sorted(ends)
    if not warm:
        evict(source)
    with closing(Reader(direct)) as reader:
        assert reader.view(source, low, high - low).tobytes() == source.read_bytes()[low:high]


@settings(deadline=None, max_examples=60)
@given(ends=st.tuples(edges, edges), piece=st.integers(1, 3 * ALIGN), direct=st.booleans())
def test_any_range_writes_and_nothing_beside_it(tmp_path_factory, ends, piece, direct):
    low, high = sorted(ends)
    path = tmp_path_factory.mktemp("disk") / "target"
    before, data = b"\xff" * SIZE, np.random.default_rng(1).integers(0, 255, high - low, np.uint8)
    path.write_bytes(before)
    with closing(Writer(path.parent, direct)) as writer:
        writer._memory = writer._memory[:0]  # streams with room for a piece and no more
        (stream,) = writer.streams([(path, low, piece)])
        for at in range(0, high - low, piece):
            part = data[at : at + piece]
            stream.room(len(part))[:] = part
            stream.advance(len(part))
        stream.close()
        writer.sync()
    assert path.read_bytes() == before[:low] + data.tobytes() + before[high:]


def test_several_streams_share_the_memory(tmp_path):
    (tmp_path / "target").write_bytes(bytes(300_000))
    with closing(Writer(tmp_path)) as writer:
        streams = writer.streams(("target", at, 100_000) for at in (0, 100_000, 200_000))
        for value, stream in enumerate(streams):
            stream.room(100_000)[:] = value
            stream.advance(100_000)
        for stream in streams:
            stream.close()
    assert (tmp_path / "target").read_bytes() == b"".join(bytes([value]) * 100_000 for value in range(3))


def test_a_file_system_that_refuses_direct_access_gets_ordinary_access(source, tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "ALIGN", 8)  # the kernel refuses such offsets
    evict(source)
    (tmp_path / "target").write_bytes(bytes(1000))
    with closing(Reader()) as reader, closing(Writer(tmp_path)) as writer:
        assert reader.view(source, 16, 1000).tobytes() == source.read_bytes()[16:1016]
        (stream,) = writer.streams([("target", 24, 900)])
        stream.room(900)[:] = 7
        stream.advance(900)
        stream.close()
    assert (tmp_path / "target").read_bytes() == bytes(24) + b"\7" * 900 + bytes(76)


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_that_ends_early_is_named(source, direct):
    evict(source)
    with closing(Reader(direct)) as reader, pytest.raises(ValueError, match="source ends early"):
        reader.view(source, SIZE - 10, 11)


def test_reserving_twice_keeps_what_is_there(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    with open(path, "r+b") as file:
        reserve(file.fileno(), 10)
        reserve(file.fileno(), 10)
    assert path.read_bytes() == b"abc" + bytes(7)
    with open(path, "r+b") as file, pytest.raises(OSError, match="No space|too large"):
        reserve(file.fileno(), 2**62)
