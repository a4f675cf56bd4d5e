"""How answers are sampled, and by which engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from d3s_megatron.rollout.engine import Sampling


@dataclass(frozen=True)
class RolloutConfig:
    """The rollout engine and its sampling; the defaults sample from the policy itself, as the method assumes."""

    engine: Literal["transformers", "vllm", "server"] = "transformers"
    """Engine that answers: built in, vLLM in the training processes, or rollout servers outside of the job."""

    servers: str = ""
    """Addresses of rollout servers, http://HOST:PORT with commas between (python -m d3s_megatron.rollout.serve)."""

    server_patience: float = 600.0
    """Seconds that a run waits for its servers to answer when it starts."""

    server_timeout: float = 120.0
    """Seconds of silence after which a server is lost; a living one sends a sign every 5."""

    weight_transport: Literal["http", "folder", "broadcast"] = "http"
    """How servers get new weights: a stream of buckets to each, a folder that run and servers both see, or one
    broadcast to all of them in a process group (NCCL where run and servers have GPUs of their own, else gloo)."""

    sync_folder: str = ""
    """Where weights are written for weight_transport "folder"; each is removed once every server has read it."""

    ahead: bool = False
    """Generate the next step's rollouts while this one trains, by weights one update older; for engine "server"."""

    probe_after_sync: bool | None = None
    """Let each engine answer a few tokens after every weight sync, and compare their log-probs with the trainer's
    before a rollout is made; null is on for engines "vllm" and "server"."""

    probe_tolerance: float = 0.0
    """Largest mean difference of that probe, in nats a token; a larger one ends the run. 0 takes 0.01 where engine and
    trainer compute in float32, else 0.1."""

    max_mismatch: float = 0.5
    """End the run where trainer and engine log-probs differ by more than this on average, in nats; 0 is off."""

    temperature: float = 1.0
    """Sampling temperature; the trainer divides its logits by the same number."""

    top_p: float = 1.0
    """Sample from the smallest set of tokens with this probability; 1 is off, which is what the trainer assumes."""

    top_k: int = 0
    """Sample from this many most likely tokens; 0 is off, which is what the trainer assumes."""

    max_new_tokens: int = 1024
    """Longest answer in tokens, end-of-sequence included."""

    vllm_memory_share: float = 0.4
    """Share of the device's memory that a vLLM engine takes for weights and cache, beside the trainer."""

    vllm_tensor_parallel: int = 1
    """Neighbouring ranks that share one vLLM engine; more than 1 for a model that does not fit one device."""

    vllm_sleep: bool = True
    """Let a vLLM engine give its memory back while the trainer works, on devices where vLLM can (not on a CPU)."""

    max_batch_size: int = 512
    """Answers decoded at once by one engine; lower it where memory is short."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the engine's weights and cache."""

    def __post_init__(self) -> None:
        if self.engine not in ("transformers", "vllm", "server"):
            raise ValueError(f"rollout.engine is {self.engine!r}: use 'transformers', 'vllm' or 'server'")
        if self.engine == "server":
            self._check_servers()
        if not self.temperature > 0:
            raise ValueError(
                f"rollout.temperature is {self.temperature}: training samples at a temperature above 0 "
                "(greedy answers have no spread to learn from)"
            )
        if self.vllm_tensor_parallel < 1:
            raise ValueError(f"rollout.vllm_tensor_parallel is {self.vllm_tensor_parallel}: give at least 1 rank")
        if self.max_batch_size < 1:
            raise ValueError(f"rollout.max_batch_size is {self.max_batch_size}: it must be at least 1")
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"rollout.dtype is {self.dtype!r}: use float32, bfloat16 or float16")
        if self.ahead and self.engine != "server":
            raise ValueError(
                f"rollout.ahead is on with rollout.engine {self.engine!r}, which shares the trainer's device: "
                "use engine 'server'"
            )
        for name, zero in (("max_mismatch", "off"), ("probe_tolerance", "what the types allow")):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"rollout.{name} is {getattr(self, name)}: give nats per token above 0, or 0 for {zero}"
                )
        self.sampling()  # checks the rest

    def _check_servers(self) -> None:
        if not self.server_addresses():
            raise ValueError(
                "rollout.servers is empty: give addresses like http://HOST:8000 with commas between, of servers "
                "started with python -m d3s_megatron.rollout.serve"
            )
        for address in self.server_addresses():
            parts = urlsplit(address)
            if parts.scheme != "http" or not parts.hostname or parts.path:
                raise ValueError(f"rollout.servers has {address!r}: give http://HOST:PORT")
        for name in ("server_patience", "server_timeout"):
            if getattr(self, name) <= 0:
                raise ValueError(f"rollout.{name} is {getattr(self, name)}: give seconds above 0")
        if self.weight_transport not in ("http", "folder", "broadcast"):
            raise ValueError(
                f"rollout.weight_transport is {self.weight_transport!r}: use 'http', 'folder' or 'broadcast'"
            )
        if self.weight_transport == "folder" and not self.sync_folder:
            raise ValueError("rollout.sync_folder is empty: name a folder that run and servers both see")

    def server_addresses(self) -> tuple[str, ...]:
        """The addresses of `servers`, each once."""
        return tuple(dict.fromkeys(part.strip().rstrip("/") for part in self.servers.split(",") if part.strip()))

    def warnings(self) -> tuple[str, ...]:
        """What a user should know of these settings, for the log."""
        if self.top_p < 1 or self.top_k:
            return (
                f"rollout.top_p {self.top_p:g} and rollout.top_k {self.top_k} renormalise the engine's log-probs over "
                "the tokens they leave; the trainer's are over the whole vocabulary, and the mismatch shows it",
            )
        return ()

    def sampling(self) -> Sampling:
        """The part an engine is given with every call."""
        return Sampling(self.temperature, self.max_new_tokens, self.top_p, self.top_k)
