"""vLLM in the training processes, or in a server's: an engine per rank or over several, weights replaced in place.

Token ids go in and come out; nothing is decoded and encoded again. Log-probs are those of the sampled token under the
distribution it was drawn from, temperature applied ("processed_logprobs"). Requests of one prompt share its prefix
through vLLM's prefix cache. On a device that supports it, the engine sleeps while the trainer works.

Ranks that share an engine put their requests together and all run it in lockstep: equal requests, seeds and logits
make every one of them draw the same tokens. Each keeps the answers to its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from d3s_megatron.convert import HFFolder, expected_hf_names, read_shape
from d3s_megatron.rollout.config import RolloutConfig
from d3s_megatron.rollout.engine import Sampling, check_length
from d3s_megatron.rollout.progress import ProgressLine
from d3s_megatron.types import Request, Rollout

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
MAX_SEED = (1 << 63) - 1
WEIGHTS, CACHE = "weights", "kv_cache"  # what vLLM can put to sleep


class VllmEngine:
    """A RolloutEngine on vLLM; see `engine.py` for what it promises.

    In a training process (`colocated`) the process group must exist before it is made: vLLM's external launcher joins
    it, and neighbouring ranks share an engine where `rollout.vllm_tensor_parallel` says so; `generate` is then a
    collective of those, and so are all other calls. A server of one process has no group.
    """

    def __init__(
        self, folder: str | Path, config: RolloutConfig, max_model_len: int, *, colocated: bool = True
    ) -> None:
        """Starts the engine and loads the folder's weights; ValueError where vLLM is not installed."""
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine lives in this process
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        try:
            from vllm import LLM, __version__
            from vllm.platforms import current_platform
        except ImportError as missing:
            raise ValueError(
                "rollout.engine is 'vllm', which is not installed: pip install -e '.[vllm]' in the clone, on a machine "
                "with a GPU; without one, make test-vllm makes .venv-vllm"
            ) from missing
        self.name, self.max_model_len = f"vllm {__version__}", max_model_len
        self.device = torch.device("cpu" if current_platform.is_cpu() else "cuda")
        self._shape = read_shape(folder)
        if current_platform.is_cpu():
            check_head_size(self._shape.head_dim)
        self._names = frozenset(expected_hf_names(self._shape))
        self._ready = False
        num_ranks = config.vllm_tensor_parallel if colocated else 1
        self._group = _neighbours(num_ranks) if num_ranks > 1 else None
        self._sleeps = colocated and config.vllm_sleep and current_platform.is_sleep_mode_available()
        self._asleep: set[str] = set()
        self._llm = LLM(
            model=str(folder),
            dtype=config.dtype,
            seed=0,  # every request has its own
            max_model_len=max_model_len,
            max_num_seqs=config.max_batch_size,
            gpu_memory_utilization=config.vllm_memory_share,
            enforce_eager=not torch.cuda.is_available(),
            enable_prefix_caching=True,
            enable_sleep_mode=self._sleeps,
            distributed_executor_backend="external_launcher" if colocated else "uni",
            tensor_parallel_size=num_ranks,
            logprobs_mode="processed_logprobs",
            disable_log_stats=True,
            # vLLM reloads only one parent of a tied weight and leaves the other as it was, without a word. With a head
            # of its own, and every weight sent by us, there is nothing tied.
            load_format="dummy",
            hf_overrides={"tie_word_embeddings": False},
        )
        self.load_weights(HFFolder(folder).tensors(self._shape))

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """One rollout a request, in request order (contract in `engine.py`)."""
        if self._group is None:
            return self._generate(requests, sampling)
        parts: list[Sequence[Request]] = [()] * self._group.size()
        dist.all_gather_object(parts, list(requests), group=self._group)
        start = sum(map(len, parts[: self._group.rank()]))
        return self._generate(list(chain.from_iterable(parts)), sampling)[start : start + len(requests)]

    def ask_each(self, requests: Sequence[Request], sampling: Sampling) -> list[tuple[str, Rollout]]:
        """The same as `generate`, for the only engine there is (contract in `engine.py`)."""
        return [("", rollout) for rollout in self.generate(requests, sampling)]

    def _generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        slots = {key: i for i, key in enumerate(self.submit(requests, sampling))}
        progress, num_tokens = ProgressLine(len(requests)), 0
        rollouts: dict[int, Rollout] = {}
        while len(rollouts) < len(requests):
            for key, answer in self.step():
                i = slots[key]
                rollouts[i] = answer(requests[i])
                num_tokens += len(rollouts[i].token_ids)
            progress.update(len(rollouts), num_tokens)
        return [rollouts[i] for i in range(len(requests))]

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> list[str]:
        """Queues requests and returns a key for each, by which `step` says which one has ended."""
        if not self._ready:
            raise RuntimeError("the engine holds no whole set of weights: it was closed, or load_weights failed")
        for request in requests:  # vLLM itself would cut the answer short
            check_length(request, sampling, self.max_model_len, "the engine's")
        from vllm import SamplingParams, TokensPrompt

        self._wake(WEIGHTS, CACHE)
        keys = self._llm.enqueue(
            [TokensPrompt(prompt_token_ids=list(request.prompt.token_ids)) for request in requests],
            [
                SamplingParams(
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    top_k=sampling.top_k or -1,
                    max_tokens=sampling.max_new_tokens,
                    seed=request.seed & MAX_SEED,
                    logprobs=0,
                    skip_special_tokens=True,
                )
                for request in requests
            ],
            use_tqdm=False,
        )
        return [_key(key) for key in keys]

    def step(self) -> list[tuple[str, Callable[[Request], Rollout]]]:
        """One decoding step of everything submitted: (key, answer to its request) of what has ended in it."""
        outputs = [output for output in self._llm.llm_engine.step() if output.finished]
        return [(_key(output.request_id), partial(_rollout, output.outputs[0])) for output in outputs]

    def abort(self) -> None:
        """Forgets everything submitted that has not ended."""
        states = self._llm.llm_engine.output_processor.request_states
        self._llm.llm_engine.abort_request(list(states), internal=True)

    def load_weights(self, stream: Iterable[tuple[str, Tensor]]) -> None:
        """Replaces every weight (contract in `engine.py`)."""
        self._ready = False
        self._wake(WEIGHTS)
        missing = set(self._names)

        def checked() -> Iterable[tuple[str, Tensor]]:
            for name, tensor in stream:
                if name not in missing:
                    known = "came twice in one stream" if name in self._names else "is unknown to the model"
                    raise ValueError(f"weight {name!r} {known}")
                missing.remove(name)
                yield name, tensor
                if self._shape.tied and name == EMBEDDING:
                    yield HEAD, tensor

        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": checked()})
        if missing:
            raise ValueError(f"{len(missing)} weights did not come, among them {min(missing)!r}")
        # Its keys and values belong to the old weights; sleep has dropped them. vLLM refuses while requests hold some.
        if CACHE not in self._asleep and not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not clear its prefix cache after new weights, as requests were still running")
        self._ready = True

    def rest(self) -> None:
        """Gives weights and cache back to the device until the next call, where vLLM can (not on a CPU)."""
        if self._sleeps and not self._asleep:
            self._llm.sleep(level=1)
            self._asleep = {WEIGHTS, CACHE}

    def _wake(self, *tags: str) -> None:
        for tag in tags:
            if tag in self._asleep:
                self._llm.wake_up(tags=[tag])
                self._asleep.remove(tag)

    def close(self) -> None:
        """Frees the engine."""
        self._ready = False
        del self._llm


def _neighbours(num_ranks: int) -> dist.ProcessGroup:
    """The group of this rank with those that share its engine; ranks of one engine follow one another, as in vLLM."""
    if dist.get_world_size() % num_ranks:
        raise ValueError(
            f"rollout.vllm_tensor_parallel is {num_ranks}, which does not divide {dist.get_world_size()} ranks"
        )
    groups = [
        dist.new_group(range(first, first + num_ranks), backend="gloo")
        for first in range(0, dist.get_world_size(), num_ranks)
    ]
    return groups[dist.get_rank() // num_ranks]


def check_head_size(head_dim: int) -> None:
    """ValueError where vLLM's attention on CPUs does not know heads of this size; it would only find out in a step."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if head_dim not in sizes:
        raise ValueError(
            f"the model's heads have {head_dim} units; vLLM without a GPU takes {', '.join(map(str, sizes))}: use "
            "rollout.engine transformers, or another model"
        )


def _rollout(answer, request: Request) -> Rollout:
    ids = tuple(answer.token_ids)
    return Rollout(
        request=request,
        token_ids=ids,
        log_probs=tuple(position[token].logprob for token, position in zip(ids, answer.logprobs, strict=True)),
        finish_reason="stop" if answer.finish_reason == "stop" else "length",
        text=answer.text,
    )


def _key(request_id: str) -> str:
    """vLLM's own number of a request; some versions put "-" and letters behind it in one place and not in another."""
    return request_id.partition("-")[0]
