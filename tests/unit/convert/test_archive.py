"""The zip around a tensor's bytes: torch.load reads ours, and we find the data in torch.save's."""

import io
import os
import pickle

import pytest
import torch

from d3s_megatron.convert.checkpoint.archive import frame, locate


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [(1,), (3, 4), (1, 5, 2), (1, 7)])
def test_torch_loads_a_framed_tensor(dtype, size):
    tensor = torch.arange(torch.Size(size).numel()).to(dtype).view(size)
    before, after = frame(dtype, size)
    loaded = torch.load(io.BytesIO(before + tensor.view(torch.uint8).numpy().tobytes() + after), weights_only=True)
    assert loaded.dtype == dtype and torch.equal(loaded, tensor)
    assert loaded.is_contiguous() and not loaded.requires_grad


def test_frames_beyond_four_gibibytes(tmp_path):
    count = (1 << 32) // 4 + 3
    before, after = frame(torch.float32, (count,))
    with open(tmp_path / "large", "wb") as file:  # sparse: it takes no space
        file.write(before)
        file.seek(len(before) + 4 * count)
        file.write(after)
    loaded = torch.load(tmp_path / "large", mmap=True, weights_only=True)
    assert loaded.shape == (count,) and loaded[-1] == 0
    with open(tmp_path / "large", "rb") as file:
        size = os.fstat(file.fileno()).st_size
        assert locate(file.fileno(), 0, size) == (torch.float32, (count,), len(before))


def saved(tmp_path, value, prefix=b""):
    data = io.BytesIO()
    torch.save(value, data)
    (tmp_path / "file").write_bytes(prefix + data.getvalue())
    return len(data.getvalue())


def test_data_of_torch_save_is_found(tmp_path):
    tensor = torch.arange(24.0).view(2, 3, 4)
    for value in (tensor, tensor[1:], tensor.bfloat16()):  # a view keeps its whole storage in the file
        length = saved(tmp_path, value, b"before")
        with open(tmp_path / "file", "rb") as file:
            dtype, size, offset = locate(file.fileno(), 6, length)
            data = os.pread(file.fileno(), value.nbytes, offset)
        assert (dtype, size) == (value.dtype, tuple(value.shape))
        assert data == value.contiguous().view(torch.uint8).numpy().tobytes()


def test_what_is_no_plain_contiguous_tensor_is_refused(tmp_path):
    cases = {
        "strides": torch.zeros(3, 4).t(),
        "only plain tensors": torch.nn.Parameter(torch.zeros(2)),
    }
    for words, value in cases.items():
        length = saved(tmp_path, value)
        with open(tmp_path / "file", "rb") as file, pytest.raises(ValueError, match=words):
            locate(file.fileno(), 0, length)
    (tmp_path / "file").write_bytes(pickle.dumps(3))
    with open(tmp_path / "file", "rb") as file, pytest.raises(ValueError, match="damaged"):
        locate(file.fileno(), 0, 14)
