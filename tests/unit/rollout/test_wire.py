"""What goes over the wire comes back bit by bit, in bounded pieces, and a byte that was changed is found."""

import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from d3s_megatron.rollout.wire import Checksum, WeightReader, device_sum, is_last, weight_frames

SHAPES = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=6)


def weights(shapes):
    torch.manual_seed(0)
    return [(f"w{i}", torch.randn(shape)) for i, shape in enumerate(shapes)]


def sent(tensors, dtype="float32", bucket_bytes=64):
    checksum = Checksum()
    return list(weight_frames(tensors, dtype, bucket_bytes, checksum)), checksum


def stream(frames):
    return io.BufferedReader(io.BytesIO(b"".join(bytes(piece) for pieces in frames for piece in pieces)))


@given(SHAPES, st.sampled_from(["float32", "bfloat16", "float16"]))
def test_weights_come_back_as_they_were_cast(shapes, dtype):
    tensors = weights(shapes)
    frames, checksum = sent(tensors, dtype)
    assert [is_last(pieces) for pieces in frames] == [False] * (len(frames) - 1) + [True]
    reader = WeightReader(stream(frames))
    for (name, tensor), (sent_name, got) in zip(tensors, reader, strict=True):
        assert name == sent_name and torch.equal(got, tensor.to(getattr(torch, dtype)))
    assert (reader.checksum.value, reader.checksum.num_bytes) == (checksum.value, checksum.num_bytes)


@given(SHAPES)
def test_no_frame_is_larger_than_a_bucket_or_its_only_tensor(shapes):
    frames, _ = sent(weights(shapes), bucket_bytes=100)
    for pieces in frames[:-1]:
        assert len(pieces) == 3 or sum(map(len, pieces[2:])) <= 100


def test_the_checksum_knows_names_and_not_order():
    values = [sent(tensors)[1].value for tensors in (weights([[2], [3]]), weights([[2], [3]])[::-1])]
    assert values[0] == values[1]
    renamed = [("other", tensor) for _, tensor in weights([[2]])]
    assert sent(renamed)[1].value != sent(weights([[2]]))[1].value


def test_a_stream_that_reuses_its_buffer_is_copied():
    buffer = torch.zeros(3)

    def reused():
        for i in range(3):
            buffer.fill_(i)
            yield f"w{i}", buffer

    frames, _ = sent(reused(), bucket_bytes=1000)
    assert [float(tensor[0]) for _, tensor in WeightReader(stream(frames))] == [0, 1, 2]


def test_changed_and_missing_bytes_are_found():
    frames, _ = sent(weights([[4], [4]]), bucket_bytes=16)
    broken = bytearray(frames[1][-1])
    broken[5] ^= 1
    with pytest.raises(ValueError, match="'w1' was changed"):
        list(WeightReader(stream([frames[0], [*frames[1][:-1], bytes(broken)], frames[2]])))
    with pytest.raises(ValueError, match="add up"):
        list(WeightReader(stream([frames[0], frames[2]])))
    with pytest.raises(ConnectionError, match="cut off"):
        list(WeightReader(stream(frames[:-1])))
    reader = WeightReader(stream(frames))
    reader.drain()
    assert reader.checksum.num_bytes == 0


@given(st.binary(min_size=2, max_size=40), st.data())
def test_the_sum_for_devices_finds_a_changed_byte_and_a_changed_place(data, draw):
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    i, j = (draw.draw(st.integers(0, len(data) - 1)) for _ in range(2))
    changed, swapped = flat.clone(), flat.clone()
    changed[i] ^= draw.draw(st.integers(1, 255))
    swapped[[i, j]] = flat[[j, i]]
    assert device_sum(changed) != device_sum(flat)
    assert (device_sum(swapped) == device_sum(flat)) == torch.equal(swapped, flat)
    expected = sum((int(byte) + 1) * (k * 0x9E3779B1 % 2**32 | 1) for k, byte in enumerate(data)) % 2**32
    assert device_sum(flat) == expected
