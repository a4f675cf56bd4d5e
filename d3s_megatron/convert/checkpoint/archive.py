"""One tensor as `torch.save` writes it: a zip of stored entries, framed around bytes that are moved in later.

A .distcp file is a row of such zips. `frame` makes everything but the data, so that the data can be copied from file
to file; `locate` finds the data of a zip that somebody else wrote. Checksums of the data are left zero, as torch does
under `torch.serialization.set_crc32_options(False)`: torch.load does not check them.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from typing import Any

import torch

_STORAGES = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
}
_DTYPES = {storage.__name__: dtype for dtype, storage in _STORAGES.items()}
_DATA = "archive/data/0"


class _Hole(io.RawIOBase):
    """A file that remembers what is written around the data, and skips the data itself."""

    def __init__(self) -> None:
        self.parts: list[bytes] = [b"", b""]
        self.position = 0
        self.part = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.parts[self.part] += bytes(data)
        self.position += len(data)
        return len(data)

    def tell(self) -> int:
        return self.position

    def skip(self, nbytes: int) -> None:
        self.part, self.position = 1, self.position + nbytes


class _Storage:
    def __init__(self, dtype: torch.dtype, numel: int) -> None:
        self.persistent_id = ("storage", _STORAGES[dtype], "0", "cpu", numel)


class _Tensor:
    """Pickles as a contiguous tensor of this dtype and size whose storage is entry 0 of the zip."""

    def __init__(self, dtype: torch.dtype, size: tuple[int, ...]) -> None:
        self.dtype, self.size = dtype, size

    def __reduce__(self) -> tuple:
        storage = _Storage(self.dtype, math.prod(self.size))
        return torch._utils._rebuild_tensor_v2, (storage, 0, self.size, _strides(self.size), False, OrderedDict())


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj.persistent_id if isinstance(obj, _Storage) else None


def frame(dtype: torch.dtype, size: tuple[int, ...]) -> tuple[bytes, bytes]:
    """Bytes before and after the data of a contiguous tensor, as torch.load reads them (beyond 4 GiB too)."""
    if dtype not in _STORAGES:
        raise ValueError(f"dtype {dtype} is not supported in a checkpoint: use one of {', '.join(map(str, _STORAGES))}")
    text = io.BytesIO()
    _Pickler(text, protocol=2).dump(_Tensor(dtype, size))
    hole = _Hole()
    with zipfile.ZipFile(hole, "w", zipfile.ZIP_STORED) as archive:
        for name, data in (("data.pkl", text.getvalue()), ("byteorder", b"little"), ("version", b"3\n")):
            archive.writestr(_entry(f"archive/{name}"), data)
        entry = _entry(_DATA)
        entry.file_size = entry.compress_size = math.prod(size) * dtype.itemsize
        entry.header_offset, entry.CRC = hole.tell(), 0
        hole.write(entry.FileHeader(zip64=entry.file_size >= zipfile.ZIP64_LIMIT))
        hole.skip(entry.file_size)
        archive.filelist.append(entry)
        archive.NameToInfo[_DATA] = entry
        archive.start_dir = hole.tell()
    return hole.parts[0], hole.parts[1]


def _strides(size: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, in elements."""
    return tuple(math.prod(size[axis + 1 :]) for axis in range(len(size)))


def _entry(name: str) -> zipfile.ZipInfo:
    return zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))  # a fixed time: the same input gives the same bytes


class Slice(io.RawIOBase):
    """Bytes [offset, offset + length) of an open file as a file of their own."""

    def __init__(self, descriptor: int, offset: int, length: int) -> None:
        self.descriptor, self.offset, self.length, self.position = descriptor, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.length}[whence]
        self.position = base + position
        return self.position

    def tell(self) -> int:
        return self.position

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self.length - self.position))
        data = os.pread(self.descriptor, count, self.offset + self.position)
        buffer[: len(data)] = data
        self.position += len(data)
        return len(data)


class _Reader(pickle.Unpickler):
    """Reads the description of one tensor and constructs nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, offset, size, stride, *rest: (storage, offset, tuple(size), tuple(stride))
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        raise ValueError(f"a checkpoint tensor names {module}.{name}: only plain tensors are read")

    def persistent_load(self, pid: Any) -> Any:
        return pid


def locate(descriptor: int, offset: int, length: int) -> tuple[torch.dtype, tuple[int, ...], int]:
    """dtype, size and the data's offset in the file, of the zip at [offset, offset + length).

    ValueError where the zip is damaged or the tensor is not contiguous.
    """
    try:
        with zipfile.ZipFile(io.BufferedReader(Slice(descriptor, offset, length))) as archive:
            root = archive.namelist()[0].split("/")[0]
            storage, skip, size, stride = _Reader(io.BytesIO(archive.read(f"{root}/data.pkl"))).load()
            dtype = storage[1]
            entry = archive.getinfo(f"{root}/data/{storage[2]}")
    except (zipfile.BadZipFile, KeyError, IndexError, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(f"no tensor at byte {offset} ({error}): the checkpoint is damaged") from error
    if any(extent > 1 and have != want for extent, have, want in zip(size, stride, _strides(size), strict=True)):
        raise ValueError(f"tensor of size {size} is stored with strides {stride}: only contiguous tensors are read")
    name, extra = struct.unpack("<HH", os.pread(descriptor, 4, offset + entry.header_offset + 26))
    data = offset + entry.header_offset + 30 + name + extra
    if (skip + math.prod(size)) * dtype.itemsize > entry.file_size:
        raise ValueError(f"tensor at byte {offset} is larger than its data: the checkpoint is damaged")
    return dtype, size, data + skip * dtype.itemsize
