"""Two ways for weights to get to servers: a stream of bounded buckets over HTTP, and a folder on a shared disk.

broadcast.py is a third. None holds the whole model in memory. All return what became of each server that did not take
the weights, and the number of bytes; a server has taken them when it answers with the same checksum over every name and
value.
"""

from __future__ import annotations

import queue
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

from torch import Tensor

from d3s_megatron.convert import read_shape, save_hf_folder
from d3s_megatron.rollout.client import Client
from d3s_megatron.rollout.dispatch import Lost
from d3s_megatron.rollout.wire import DTYPES, Checksum, Pieces, is_last, weight_frames

BUCKET_BYTES = 64 * 2**20

Outcome = dict[str, Lost | ValueError]  # address -> why it has no weights


def by_stream(
    clients: Sequence[Client], stream: Iterable[tuple[str, Tensor]], dtype: str, version: str
) -> tuple[Outcome, int]:
    """Sends every frame to all servers at once, a thread for each; at most three buckets are in memory.

    A server that fails is given up; the stream is drawn to its end in any case, since it is a collective.
    """
    checksum, frames = Checksum(), [_Frames() for _ in clients]
    with ThreadPoolExecutor(max(1, len(clients))) as pool:
        replies = {
            client.address: pool.submit(_upload, client, mine, version)
            for client, mine in zip(clients, frames, strict=True)
        }
        try:
            for pieces in weight_frames(stream, dtype, BUCKET_BYTES, checksum):
                for mine in frames:
                    mine.put(pieces)
        except BaseException:
            for mine in frames:
                mine.put(_CUT_OFF)
            raise
        return outcome_of(replies, version, checksum), checksum.num_bytes


def _upload(client: Client, frames: _Frames, version: str) -> dict[str, Any]:
    try:
        client.health()  # says soon where nobody is there
        with closing(client.connect()) as connection:
            connection.begin(f"/weights?version={version}")
            for pieces in frames:
                for piece in pieces:
                    connection.send(piece)
            return connection.reply()
    finally:
        frames.close()


_CUT_OFF: Pieces = []  # stands for a stream that failed; the server notices the closed connection


class _Frames:
    """Frames on their way to one upload, one at a time; once closed, what is put is dropped."""

    def __init__(self) -> None:
        self._frames: queue.Queue[Pieces] = queue.Queue(maxsize=1)
        self._closed = False

    def put(self, pieces: Pieces) -> None:
        while not self._closed:
            try:
                self._frames.put(pieces, timeout=0.1)
                return
            except queue.Full:
                continue

    def __iter__(self) -> Iterator[Pieces]:
        while (pieces := self._frames.get()) is not _CUT_OFF:
            yield pieces
            if is_last(pieces):
                return
        raise Lost("the stream of weights failed on its way out of the trainer")

    def close(self) -> None:
        self._closed = True


def by_folder(
    clients: Sequence[Client],
    stream: Iterable[tuple[str, Tensor]],
    dtype: str,
    version: str,
    sync_folder: Path,
    model: Path,
) -> tuple[Outcome, int]:
    """Writes a Hugging Face folder, which has its name only when it is whole, lets all servers read it, removes it."""
    checksum, folder = Checksum(), (sync_folder / f"weights-{version}").resolve()

    def counted() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in stream:
            tensor = tensor.detach().to(device="cpu", dtype=DTYPES[dtype]).contiguous()
            checksum.add(name, tensor.reshape(-1))
            yield name, tensor

    save_hf_folder(folder, read_shape(model), counted(), model, DTYPES[dtype])
    try:
        with ThreadPoolExecutor(max(1, len(clients))) as pool:
            replies = {
                client.address: pool.submit(client.load_folder, str(folder), dtype, version) for client in clients
            }
            return outcome_of(replies, version, checksum), checksum.num_bytes
    finally:
        shutil.rmtree(folder)


def outcome_of(replies: Mapping[str, Future[dict[str, Any]]], version: str, checksum: Checksum) -> Outcome:
    """Waits for what every server, by its address, says of the weights."""
    outcome: Outcome = {}
    for address, future in replies.items():
        try:
            reply = future.result()
        except (Lost, ValueError) as failed:
            outcome[address] = failed
            continue
        if (reply["version"], reply["checksum"]) != (version, checksum.value):
            outcome[address] = Lost(f"it read weights of checksum {reply['checksum']}, not {checksum.value}")
    return outcome
