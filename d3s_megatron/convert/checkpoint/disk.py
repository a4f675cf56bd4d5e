"""Runs of bytes from and to disk, of any offset and length, past the page cache where the file system can.

Through the page cache every byte takes a fresh page on either side, and the writers of one file wait for each other:
more than half of a conversion's time. Direct reads and writes go between the disk and a few megabytes that stay. What
the cache holds already (a model just downloaded) is read from there. A file system that knows no direct access, or
refuses it, gets ordinary reads and writes.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

# Offsets, lengths and addresses of direct access are multiples of this: enough for all block sizes in use.
ALIGN = 4096
# Bytes of one direct read or write; two workers with 2, 4 and 8 MB were equally fast.
STEP_BYTES = 4 * 2**20
# The largest run that `Reader.view` gives: it fits into a step however it is aligned.
VIEW_BYTES = STEP_BYTES - 2 * ALIGN
_HUGE = 2 * 2**20  # with huge pages a request to the disk is one piece; with small ones it took twice as long
_PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)


class _Files:
    """Descriptors of one worker, opened on first use: an ordinary one of every file, and a direct one or None."""

    def __init__(self, flags: int, root: Path, direct: bool) -> None:
        self._flags, self._root = flags, root
        self._wants_direct = direct and hasattr(os, "O_DIRECT")
        self._plain: dict[Path, int] = {}
        self._direct: dict[Path, int | None] = {}

    def plain(self, file: Path) -> int:
        """Descriptor for reads and writes through the page cache."""
        if file not in self._plain:
            self._plain[file] = os.open(self._root / file, self._flags)
        return self._plain[file]

    def direct(self, file: Path) -> int | None:
        """Descriptor past the page cache; None where the file system has none."""
        if file not in self._direct:
            self._direct[file] = None
            if self._wants_direct:
                try:
                    self._direct[file] = os.open(self._root / file, self._flags | os.O_DIRECT)
                except OSError as error:
                    if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                        raise
        return self._direct[file]

    def refuse_direct(self, file: Path) -> None:
        """Use the page cache for this file from now on."""
        descriptor = self._direct.get(file)
        if descriptor is not None:
            os.close(descriptor)
        self._direct[file] = None

    def close(self) -> None:
        """Close all."""
        for descriptor in (*self._plain.values(), *self._direct.values()):
            if descriptor is not None:
                os.close(descriptor)
        self._plain, self._direct = {}, {}


class Reader(_Files):
    """Reads of one worker."""

    def __init__(self, direct: bool = True) -> None:
        super().__init__(os.O_RDONLY, Path(), direct)
        self._memory = _memory(STEP_BYTES)
        self._maps: dict[Path, mmap.mmap | None] = {}

    def view(self, file: Path, offset: int, nbytes: int) -> Bytes:
        """Bytes [offset, offset + nbytes) of a file, at most VIEW_BYTES of them; valid until the next call.

        ValueError where the file ends before.
        """
        assert nbytes <= VIEW_BYTES
        descriptor = self.direct(file)
        if descriptor is not None and not self._cached(file, offset, nbytes):
            first, last = _down(offset), _up(offset + nbytes)
            try:
                found = _read(descriptor, self._memory[: last - first], first, offset + nbytes - first, file)
                return found[offset - first : offset - first + nbytes]
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.refuse_direct(file)
        return _read(self.plain(file), self._memory[:nbytes], offset, nbytes, file)

    def read(self, file: Path, offset: int, out: Bytes) -> None:
        """Fill `out` with the bytes at `offset`, however many."""
        for at in range(0, len(out), VIEW_BYTES):
            part = out[at : at + VIEW_BYTES]
            np.copyto(part, self.view(file, offset + at, len(part)))

    def close(self) -> None:
        """Close all."""
        super().close()
        self._maps = {}

    def _cached(self, file: Path, offset: int, nbytes: int) -> bool:
        """Whether all of these bytes are in the page cache."""
        if file not in self._maps:
            try:
                self._maps[file] = mmap.mmap(self.plain(file), 0, mmap.MAP_SHARED, mmap.PROT_READ)
            except (OSError, ValueError):  # nothing to map: not known
                self._maps[file] = None
        mapped = self._maps[file]
        if mapped is None or offset + nbytes > len(mapped):
            return False
        start = offset // _PAGE * _PAGE
        pages = np.empty(-(-(offset + nbytes - start) // _PAGE), np.uint8)
        address = np.frombuffer(mapped, np.uint8).ctypes.data + start
        length = ctypes.c_size_t(offset + nbytes - start)
        failed = _libc.mincore(ctypes.c_void_p(address), length, ctypes.c_void_p(pages.ctypes.data))
        return not failed and bool((pages & 1).all())


class Writer(_Files):
    """Writes of one worker into files of their final size, below `root`."""

    def __init__(self, root: Path = Path(), direct: bool = True) -> None:
        super().__init__(os.O_WRONLY, root, direct)
        self._memory = _memory(STEP_BYTES)

    def streams(self, runs: Iterable[tuple[Path, int, int]]) -> list[Stream]:
        """A stream for each (file, offset, largest piece in bytes); they are valid until the next call."""
        runs = list(runs)
        # A piece fits beside what an earlier one left, and the streams share what there is in these parts.
        least = [_up(piece) + ALIGN for _, _, piece in runs]
        total = sum(least)
        if total > len(self._memory):
            self._memory = _memory(total)
        streams, at = [], 0
        for (file, offset, _), share in zip(runs, least, strict=True):
            size = _down(len(self._memory) * share // total)
            streams.append(Stream(self, file, offset, self._memory[at : at + size]))
            at += size
        return streams

    def put(self, file: Path, offset: int, data: Bytes) -> None:
        """Write through the page cache."""
        while len(data):
            done = os.pwrite(self.plain(file), data.data, offset)
            data, offset = data[done:], offset + done

    def put_direct(self, file: Path, offset: int, data: Bytes) -> None:
        """Write past the page cache where that is possible; offset, length and address are aligned."""
        descriptor = self.direct(file)
        while descriptor is not None and len(data):
            try:
                done = os.pwrite(descriptor, data.data, offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.refuse_direct(file)
                break
            data, offset = data[done:], offset + done
            if done % ALIGN:
                break
        self.put(file, offset, data)

    def sync(self) -> None:
        """Wait until what was written is on disk."""
        for file in {*self._plain, *self._direct}:
            os.fdatasync(self.plain(file))


class Stream:
    """Bytes written one after the other from an offset on; only the first and last ALIGN go through the page cache."""

    def __init__(self, writer: Writer, file: Path, offset: int, memory: Bytes) -> None:
        self._writer, self._file, self._memory = writer, file, memory
        self._start = _down(offset)  # where the memory's first byte belongs
        self._low = self._high = offset - self._start  # what the memory holds

    def room(self, nbytes: int) -> Bytes:
        """Memory for the next bytes; `advance` says when they are there."""
        if self._high + nbytes > len(self._memory):
            self._flush()
        assert self._high + nbytes <= len(self._memory)
        return self._memory[self._high : self._high + nbytes]

    def advance(self, nbytes: int) -> None:
        """Count bytes that were put into `room`."""
        self._high += nbytes

    def close(self) -> None:
        """Write what is left."""
        self._flush()
        self._writer.put(self._file, self._start + self._low, self._memory[self._low : self._high])

    def _flush(self) -> None:
        """Write all whole blocks, and keep the rest at the start of the memory."""
        first, last = min(_up(self._low), self._high), _down(self._high)
        if last < first:
            return
        self._writer.put(self._file, self._start + self._low, self._memory[self._low : first])
        self._writer.put_direct(self._file, self._start + first, self._memory[first:last])
        self._memory[: self._high - last] = self._memory[last : self._high]
        self._start, self._low, self._high = self._start + last, 0, self._high - last


def reserve(descriptor: int, size: int) -> None:
    """Give a file its size and, where the file system can, its space; OSError where the disk is full.

    Not os.posix_fallocate, which on such a file system writes a byte into every block.
    """
    if size == 0:
        return
    if hasattr(_libc, "fallocate"):
        if _libc.fallocate(descriptor, 0, ctypes.c_longlong(0), ctypes.c_longlong(size)) == 0:
            return
        number = ctypes.get_errno()
        if number not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise OSError(number, os.strerror(number))
    os.ftruncate(descriptor, max(size, os.fstat(descriptor).st_size))


def _read(descriptor: int, out: Bytes, offset: int, least: int, file: Path) -> Bytes:
    """Read into `out`, at least `least` bytes of it; ValueError where the file ends before."""
    done = 0
    while done < least:
        count = os.preadv(descriptor, [out[done:].data], offset + done)
        if not count:
            raise ValueError(f"{file} ends early: it changed while it was converted")
        done += count
    return out


def _memory(nbytes: int) -> Bytes:
    """Anonymous memory, aligned to huge pages and made of them where the system has them."""
    area = mmap.mmap(-1, _HUGE + -(-nbytes // _HUGE) * _HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            area.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a kernel built without them
                raise
    whole = np.frombuffer(area, np.uint8)
    start = -whole.ctypes.data % _HUGE
    return whole[start : start + nbytes]


def _down(value: int) -> int:
    return value // ALIGN * ALIGN


def _up(value: int) -> int:
    return -(-value // ALIGN) * ALIGN
