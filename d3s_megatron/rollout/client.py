"""Calls to one rollout server."""

from __future__ import annotations

import json
import select
from collections.abc import Sequence
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import urlsplit

from d3s_megatron.rollout.dispatch import Lost
from d3s_megatron.rollout.engine import Sampling
from d3s_megatron.rollout.wire import pack_requests, unpack_rollouts
from d3s_megatron.types import Request, Rollout

LOOK_SECONDS = 30.0  # a server that is well says so at once, however busy its machine


class Client:
    """One server by its address, http://HOST:PORT. Calls may be made from several threads at once.

    Raises:
        Lost: the server does not answer, sends nothing for `timeout` seconds, or does not hold the weights asked for.
        ValueError: the server refused the call, and every other one would too.
    """

    def __init__(self, address: str, timeout: float) -> None:
        self.address, self._timeout = address, timeout

    def health(self) -> dict[str, Any]:
        """What the server says of itself."""
        with closing(self.connect(LOOK_SECONDS)) as connection:
            connection.request_of("GET", "/health")
            return connection.reply()

    def generate(self, requests: Sequence[Request], sampling: Sampling, version: str) -> list[Rollout]:
        """Answers under the weights of that name, in order."""
        with closing(self.connect()) as connection:
            connection.request_of("POST", "/generate", pack_requests(requests, sampling, version))
            return unpack_rollouts(connection.reply(), requests)

    def load_folder(self, folder: str, dtype: str, version: str) -> dict[str, Any]:
        """Lets the server read its weights from a Hugging Face folder."""
        with closing(self.connect()) as connection:
            body = json.dumps({"folder": folder, "dtype": dtype, "version": version}).encode()
            connection.request_of("POST", "/weights_folder", body)
            return connection.reply()

    def connect(self, timeout: float | None = None) -> Connection:
        """An open connection."""
        return Connection(self.address, timeout or self._timeout)


class Connection:
    """One call; every failure of the network is a `Lost`."""

    def __init__(self, address: str, timeout: float) -> None:
        parts = urlsplit(address)
        self._http = HTTPConnection(parts.hostname or "", parts.port or 80, timeout=timeout)

    def request_of(self, method: str, path: str, body: bytes | None = None) -> None:
        """Sends a whole call."""
        self._try(self._http.request, method, path, body)

    def begin(self, path: str) -> None:
        """Begins a call whose body follows piece by piece."""
        self._try(self._http.putrequest, "POST", path)
        self._try(self._http.endheaders)

    def send(self, piece: bytes | memoryview) -> None:
        """More of the body."""
        self._try(self._http.send, piece)

    def reply(self) -> Any:
        """The answer's JSON; blanks that kept the connection alive stand before it."""
        response = self._try(self._http.getresponse)
        body = self._try(response.read)
        try:
            data = json.loads(body)
        except ValueError:
            raise Lost(f"it broke off in the middle of an answer (status {response.status})") from None
        if isinstance(data, dict) and "error" in data:
            if data["error"] == "refused":
                raise ValueError(data["message"])
            raise Lost(data["message"])
        return data

    @property
    def own_address(self) -> str:
        """The address of this machine by which the server reaches it."""
        return self._http.sock.getsockname()[0]

    def is_gone(self) -> bool:
        """Whether the server has closed its end, also where bytes that came before are still to be read."""
        poll = select.poll()
        poll.register(self._http.sock, getattr(select, "POLLRDHUP", 0))
        return bool(poll.poll(0))

    def close(self) -> None:
        """Ends the call."""
        self._http.close()

    @staticmethod
    def _try(call, *args):
        try:
            return call(*args)
        except (OSError, HTTPException) as gone:
            raise Lost(f"{type(gone).__name__}: {gone}" if str(gone) else type(gone).__name__) from gone
