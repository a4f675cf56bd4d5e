"""A rollout server: `python -m d3s_megatron.rollout.serve --model FOLDER --port 8000`, one per device.

For a model that does not fit one device: `torchrun --nproc-per-node 2 -m d3s_megatron.rollout.serve ...`, one engine
over those ranks.

A run reaches it with `--rollout.engine server --rollout.servers http://HOST:8000,...`, gives it its weights before the
first answer and after every update, and says with every call which weights it wants. Anybody who can reach the port
can do the same, so keep it inside of the cluster.

    GET  /health                    what is served, and the name of its weights
    POST /generate                  token ids, seeds, sampling -> token ids, log-probs, finish reasons, text
    POST /weights?version=NAME      a stream of frames (wire.py): every weight of the model
    POST /weights_broadcast?version=NAME   the same, whose bytes come by broadcast in a process group (group.py)
    POST /weights_folder            {"version", "folder"}: the same from a Hugging Face folder that this machine sees
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch

from d3s_megatron.convert import HFFolder, ModelShape, read_shape
from d3s_megatron.rollout import lockstep
from d3s_megatron.rollout.config import RolloutConfig
from d3s_megatron.rollout.engine import RolloutEngine
from d3s_megatron.rollout.group import BroadcastReader, Membership, device_name
from d3s_megatron.rollout.make import make_engine
from d3s_megatron.rollout.serving import Call, Stale, StepwiseEngine, Weights, Worker
from d3s_megatron.rollout.wire import Checksum, WeightReader, pack_rollouts, unpack_requests

HEARTBEAT_SECONDS = 5.0  # a call that waits sends a blank so often: silence means that the server is gone
SOCKET_SECONDS = 600.0  # a client that stops in the middle of a stream is given up after so long


class Server(ThreadingHTTPServer):
    """An engine and its HTTP side: a thread a connection, all of them in front of one worker."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(
        self,
        engine: RolloutEngine | StepwiseEngine,
        model: Path,
        config: RolloutConfig,
        max_model_len: int,
        **place: Any,
    ) -> None:
        """Listens at once, in threads; `place` is host (default 127.0.0.1) and port (default 0, a free one)."""
        host = place.get("host", "127.0.0.1")
        super().__init__((host, place.get("port", 0)), Handler)
        self.shape = read_shape(model)
        self.name = getattr(engine, "name", "transformers")
        self.address = f"http://{host}:{self.server_address[1]}"
        self.facts = {
            "engine": self.name,
            "dtype": config.dtype,
            "max_model_len": max_model_len,
            "shape": shape_facts(self.shape),
            "device": device_name(getattr(engine, "device", torch.device("cpu"))),
        }
        self.membership = Membership()
        self.worker = Worker(engine)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stops listening and frees the engine."""
        self.shutdown()
        self.server_close()
        self.worker.close()
        self.membership.leave()


class Handler(BaseHTTPRequestHandler):
    """One call. Its answer is JSON; {"error", "message"} where it went wrong, since the status goes out first."""

    server: Server
    timeout = SOCKET_SECONDS

    def do_GET(self) -> None:
        """Health; anything else is not found."""
        if urlsplit(self.path).path != "/health":
            self.send_error(404)
            return
        self._begin()
        worker = self.server.worker
        state = {"version": worker.version, "num_waiting": worker.num_waiting, "alive": worker.thread.is_alive()}
        state["group"] = self.server.membership.name
        self.wfile.write(json.dumps(self.server.facts | state).encode())

    def do_POST(self) -> None:
        """A call for answers, or new weights."""
        url = urlsplit(self.path)
        make = {
            "/generate": self._generate,
            "/weights": self._stream,
            "/weights_broadcast": self._broadcast,
            "/weights_folder": self._folder,
        }.get(url.path)
        if make is None:
            self.send_error(404)
            return
        self._begin()
        try:
            answer = make(parse_qs(url.query))
        except Stale as stale:
            answer = _error("stale", stale)
        except (ValueError, KeyError, TypeError) as refused:
            answer = _error("refused", refused)
        except ConnectionError as gone:
            self.log_error("the client went away: %s", gone)
            return
        except Exception as failed:
            answer = _error("failed", failed)
        self.wfile.write(answer)

    def _generate(self, query: dict[str, list[str]]) -> bytes:
        call = Call(*unpack_requests(self._body()))
        self.server.worker.put(call)
        return pack_rollouts(self._wait(call.rollouts))

    def _stream(self, query: dict[str, list[str]]) -> bytes:
        return self._load(WeightReader(self.rfile), query["version"][0])

    def _broadcast(self, query: dict[str, list[str]]) -> bytes:
        version, own_address = query["version"][0], self.connection.getsockname()[0]
        return self._load(BroadcastReader(self.rfile, version, self.server.membership, own_address), version)

    def _load(self, reader: WeightReader, version: str) -> bytes:
        weights = Weights(reader, version)
        self.server.worker.put(weights)
        try:
            self._wait(weights.loaded)
        except ValueError:
            reader.drain()
            raise
        return _loaded(weights, reader.checksum)

    def _folder(self, query: dict[str, list[str]]) -> bytes:
        asked = json.loads(self._body())
        source, checksum, dtype = HFFolder(asked["folder"]), Checksum(), asked["dtype"]
        source.check(self.server.shape)

        def stream():
            for name, tensor in source.tensors(self.server.shape):
                if str(tensor.dtype) != f"torch.{dtype}":
                    raise ValueError(f"weight {name!r} is {tensor.dtype} in {asked['folder']}, not {dtype}")
                checksum.add(name, tensor.contiguous().reshape(-1))
                yield name, tensor

        weights = Weights(stream(), asked["version"])
        self.server.worker.put(weights)
        self._wait(weights.loaded)
        return _loaded(weights, checksum)

    def _wait(self, future: Future) -> Any:
        """The future's result; sends blanks meanwhile, and gives up where the engine has died."""
        while True:
            try:
                return future.result(timeout=HEARTBEAT_SECONDS)
            except NotYet:
                if future.done():
                    raise
                if not self.server.worker.thread.is_alive():
                    raise RuntimeError("the engine has ended; the server's own output says why") from None
                self.wfile.write(b" ")

    def _begin(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"]))

    def log_request(self, code: object = "-", size: object = "-") -> None:
        """Nothing: a run makes thousands of calls."""


def _error(kind: str, error: BaseException) -> bytes:
    return json.dumps({"error": kind, "message": f"{error}" if isinstance(error, ValueError) else repr(error)}).encode()


def _loaded(weights: Weights, checksum: Checksum) -> bytes:
    return json.dumps(
        {"version": weights.version, "checksum": checksum.value, "num_bytes": checksum.num_bytes}
    ).encode()


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m d3s_megatron.rollout.serve",
        description="Serves answers to a training run, which sends its weights. Start one per device "
        "(CUDA_VISIBLE_DEVICES), or one over several by torchrun, before or after the run; end it with Ctrl-C.",
    )
    parser.add_argument("--model", type=Path, required=True, help="the Hugging Face folder that the run trains")
    parser.add_argument("--engine", choices=("vllm", "transformers"), default="vllm", help="default: vllm")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for other machines")
    parser.add_argument("--port", type=int, default=8000, help="default: 8000; 0 takes a free one and prints it")
    parser.add_argument("--max-model-len", type=int, help="longest prompt and answer; default: the model's positions")
    parser.add_argument("--max-batch-size", type=int, default=512, help="answers decoded at once (default 512)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of the weights")
    parser.add_argument("--memory-share", type=float, default=0.9, help="of the device, for vLLM (default 0.9)")
    parser.add_argument("--device", default="cpu", help="of the transformers engine (default cpu)")
    return parser


def main(argv: list[str]) -> int:
    """Serves until SIGINT or SIGTERM (exit code 0), or until the engine fails (1)."""
    args = make_parser().parse_args(argv)
    num_ranks = lockstep.join()
    config = RolloutConfig(
        engine=args.engine,
        dtype=args.dtype,
        max_batch_size=args.max_batch_size,
        vllm_memory_share=args.memory_share,
        vllm_tensor_parallel=num_ranks,
        vllm_sleep=False,
    )
    try:
        shape = read_shape(args.model)
        longest = min(args.max_model_len or shape.max_positions, shape.max_positions)
        if num_ranks > 1 and args.engine == "transformers":
            raise ValueError("the transformers engine runs on one device: start it without torchrun, or take vllm")
        engine: RolloutEngine | StepwiseEngine = make_engine(
            args.model, config, longest, args.device, colocated=num_ranks > 1
        )
    except ValueError as wrong:
        print(f"error: {wrong}", file=sys.stderr)
        return 2
    if num_ranks > 1:
        if int(os.environ["RANK"]) > 0:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)  # it ends when the leader does
            lockstep.follow(engine)
            return 0
        engine = lockstep.Leader(engine)
    server = Server(engine, args.model, config, longest, host=args.host, port=args.port)
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    print(f"serving {args.model} by {server.name} at {server.address}", flush=True)
    while not ended.wait(timeout=1.0):
        if not server.worker.thread.is_alive():
            return 1
    server.close()
    return 0


def shape_facts(shape: ModelShape) -> dict[str, str]:
    """What run and server must agree on; the type of the weights may differ."""
    return {name: str(value) for name, value in asdict(shape).items() if name != "dtype"}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
