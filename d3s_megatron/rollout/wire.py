"""What goes between a run and a rollout server: JSON for requests and answers, frames of bytes for weights.

A frame is 4 bytes of length (big endian), that many bytes of JSON, and the bytes the JSON announces. Nothing is ever
unpickled. A stream of weights is frames of tensors and one frame that ends it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from io import BufferedIOBase
from typing import Any

import torch
from torch import Tensor

from d3s_megatron.rollout.engine import Sampling
from d3s_megatron.types import Prompt, Request, Rollout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Pieces = list[bytes | memoryview]  # of one frame, in the order in which they are sent

MAX_HEADER_BYTES = 64 * 2**20  # a frame names a few thousand tensors at most; more is no frame of ours


def pack_requests(requests: Sequence[Request], sampling: Sampling, version: str) -> bytes:
    """The body of a call for answers under the weights called `version`."""
    asked = [{"uid": r.uid, "prompt": r.prompt.token_ids, "seed": r.seed} for r in requests]
    return json.dumps({"version": version, "sampling": asdict(sampling), "requests": asked}).encode()


def unpack_requests(body: bytes) -> tuple[list[Request], Sampling, str]:
    """What `pack_requests` packed; a prompt is its token ids alone."""
    data = json.loads(body)
    requests = [
        Request(r["uid"], 0, Prompt(f"request {r['uid']}", "", tuple(r["prompt"]), ""), r["seed"])
        for r in data["requests"]
    ]
    return requests, Sampling(**data["sampling"]), data["version"]


def pack_rollouts(rollouts: Sequence[Rollout]) -> bytes:
    """The answers, in the order of their requests; log-probs keep every bit."""
    return json.dumps(
        [{"ids": r.token_ids, "log_probs": r.log_probs, "finish": r.finish_reason, "text": r.text} for r in rollouts]
    ).encode()


def unpack_rollouts(answers: Any, requests: Sequence[Request]) -> list[Rollout]:
    """The JSON of `pack_rollouts`, joined to the requests it answers; ValueError where it is no answer to them."""
    if not isinstance(answers, list) or len(answers) != len(requests):
        raise ValueError(f"{len(requests)} answers were asked for, the server sent something else")
    return [
        Rollout(request, tuple(answer["ids"]), tuple(answer["log_probs"]), answer["finish"], answer["text"])
        for request, answer in zip(requests, answers, strict=True)
    ]


def frame(header: dict[str, Any], *payload: memoryview) -> Pieces:
    """A frame as the pieces to send; the length of the payload goes into the header as "bytes"."""
    text = json.dumps(header | {"bytes": sum(map(len, payload))}).encode()
    return [len(text).to_bytes(4, "big"), text, *payload]


def is_last(pieces: Pieces) -> bool:
    """Whether a frame of `weight_frames` is the one that ends its stream: it alone has no payload."""
    return len(pieces) == 2


def _bytes(flat: Tensor) -> memoryview:
    return flat.view(torch.uint8).numpy().data


class Checksum:
    """A CRC-32 over names and values of tensors that does not depend on their order.

    Values on a GPU are summed up there in their place (`device_sum`): both ends of a stream have theirs on a GPU, or
    neither.
    """

    def __init__(self) -> None:
        self.value = self.num_bytes = 0

    def add(self, name: str, flat: Tensor) -> int:
        """Adds a tensor [n] with its name, and returns the checksum of these two alone."""
        crc = zlib.crc32(name.encode())
        crc = (crc + device_sum(flat)) % 2**32 if flat.is_cuda else zlib.crc32(_bytes(flat), crc)
        self.value = (self.value + crc) % 2**32
        self.num_bytes += flat.nbytes
        return crc


_SUM_BYTES_AT_ONCE = 1 << 24
_SUM_FACTOR = 0x9E3779B1  # odd: a changed byte always changes the sum


def device_sum(flat: Tensor) -> int:
    """A checksum of 32 bits over the bytes of a tensor [n], on any device: sum of (byte + 1) x odd number of its place.

    Modulo 2^32; it finds every single byte that was changed, and bytes that changed places.
    """
    data, total = flat.view(torch.uint8), 0
    for start in range(0, len(data), _SUM_BYTES_AT_ONCE):
        part = data[start : start + _SUM_BYTES_AT_ONCE].long() + 1
        place = torch.arange(start, start + len(part), device=data.device)
        total += int((part * ((place * _SUM_FACTOR) % 2**32 | 1)).sum()) % 2**32
    return total % 2**32


Held = list[tuple[str, Tensor]]  # the tensors of a bucket


def buckets(
    stream: Iterable[tuple[str, Tensor]], dtype: str, bucket_bytes: int, device: torch.device | str = "cpu"
) -> Iterator[Held]:
    """A stream of weights in buckets of at most `bucket_bytes`, cast to `dtype`; a larger tensor has one of its own."""
    held: Held = []
    size = 0
    for name, tensor in stream:
        # A copy, since a stream may reuse its buffer for the next bucket.
        tensor = tensor.detach().to(device=device, dtype=DTYPES[dtype], copy=True).contiguous()
        if held and size + tensor.nbytes > bucket_bytes:
            yield held
            held, size = [], 0
        held.append((name, tensor))
        size += tensor.nbytes
    if held:
        yield held


def describe(held: Held, dtype: str, checksum: Checksum) -> tuple[dict[str, Any], list[Tensor]]:
    """The header of a bucket, with name, shape and checksum of every tensor, and its tensors, flat."""
    flats = [tensor.reshape(-1) for _, tensor in held]
    tensors = [
        (name, tuple(tensor.shape), checksum.add(name, flat)) for (name, tensor), flat in zip(held, flats, strict=True)
    ]
    return {"tensors": tensors, "dtype": dtype}, flats


def weight_frames(
    stream: Iterable[tuple[str, Tensor]], dtype: str, bucket_bytes: int, checksum: Checksum
) -> Iterator[Pieces]:
    """A stream of weights as frames of at most `bucket_bytes`, cast to `dtype`, and a last one with the checksum.

    A tensor larger than that is a frame of its own. `checksum` is whole once the last frame has been drawn.
    """
    for held in buckets(stream, dtype, bucket_bytes):
        header, flats = describe(held, dtype, checksum)
        yield frame(header, *(_bytes(flat) for flat in flats))
    yield last_frame(checksum)


def last_frame(checksum: Checksum) -> Pieces:
    """What ends a stream of weights."""
    return frame({"end": True, "checksum": checksum.value})


class WeightReader:
    """Reads the frames of `weight_frames`; iterate it once, then `checksum` is that of the whole stream."""

    def __init__(self, source: BufferedIOBase) -> None:
        self._source = source
        self._end: dict[str, Any] | None = None
        self.checksum = Checksum()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) pairs; ConnectionError where the stream is cut off, ValueError where its bytes are wrong."""
        for header, flat in self.buckets():
            flat = flat.view(DTYPES[header["dtype"]])
            sizes = [torch.Size(shape).numel() for _, shape, _ in header["tensors"]]
            for (name, shape, crc), part in zip(header["tensors"], flat.split(sizes), strict=True):
                if self.checksum.add(name, part) != crc:
                    raise ValueError(f"weight {name!r} was changed on its way")
                yield name, part.view(shape)
        assert self._end is not None
        if self._end["checksum"] != self.checksum.value:
            raise ValueError("the stream of weights does not add up to the checksum at its end")

    def drain(self) -> None:
        """Reads to the end without a look, so that a sender whose weights were refused gets to hear why."""
        for _ in self.buckets():
            pass

    def buckets(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        """(header, bytes [n] uint8) of every bucket that is still to come."""
        while self._end is None:
            header = self._header()
            if "end" in header:
                self._end = header
            else:
                yield from self._take(header)

    def _take(self, header: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Tensor]]:
        """What a frame that is not the last one brings."""
        flat = torch.empty(header["bytes"], dtype=torch.uint8)
        self._read_into(_bytes(flat))
        yield header, flat

    def _header(self) -> dict[str, Any]:
        length = int.from_bytes(self._exactly(4), "big")
        if length > MAX_HEADER_BYTES:
            raise ValueError("what came is no stream of weights")
        return json.loads(self._exactly(length))

    def _exactly(self, num: int) -> bytearray:
        got = bytearray(num)
        self._read_into(memoryview(got))
        return got

    def _read_into(self, view: memoryview) -> None:
        start = 0
        while start < len(view):
            more = self._source.readinto(view[start:])
            if not more:
                raise ConnectionError("the stream of weights was cut off")
            start += more
