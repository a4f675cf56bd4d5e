"""Rollout servers with the real vLLM, as processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from helpers import ROOT

MAX_MODEL_LEN = 256


class ServerProcess:
    """`python -m d3s_megatron.rollout.serve` on a free port, or torchrun of it; `address` waits until it serves."""

    def __init__(self, model: Path, num_ranks: int = 1, *options: str, **environment: str) -> None:
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "VLLM_CPU_KVCACHE_SPACE": "1"}
        env |= environment
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            env.pop(name, None)
        command = ["-m", "d3s_megatron.rollout.serve", "--model", str(model), "--port", "0", "--max-batch-size", "32"]
        if num_ranks > 1:
            command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks), *command]
        self.process = subprocess.Popen(
            [sys.executable, *command, "--max-model-len", str(MAX_MODEL_LEN), *options],
            env=env,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._address = ""

    @property
    def address(self) -> str:
        while not self._address:
            line = self.process.stdout.readline()
            assert line, f"the server ended with {self.process.wait()}"
            if line.startswith("serving "):
                self._address = line.split()[-1]
        return self._address

    def end(self) -> int:
        """Asks it to end, where it still runs; its exit code. torchrun ends its ranks."""
        self.process.terminate()
        return self.process.wait(timeout=120)


def addresses(servers: Sequence[ServerProcess]) -> str:
    return ",".join(server.address for server in servers)
