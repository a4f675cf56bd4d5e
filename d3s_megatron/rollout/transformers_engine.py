"""The built-in engine: a Hugging Face model, decoded in batches in this process.

1. Rows are ordered by prompt, so that the G requests of a prompt sit together, and cut into batches.
2. Each distinct prompt is run once; its cache rows are then repeated for its requests.
3. All rows of a batch decode in step; finished rows leave once enough of them have gathered.

Left out: refilling a batch with new requests, paged caches, tensor parallelism. The vLLM engine is for those.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import Cache

from d3s_megatron.rollout.cache import join_rows, new_cache, select_rows
from d3s_megatron.rollout.config import RolloutConfig
from d3s_megatron.rollout.engine import Sampling, check_length
from d3s_megatron.rollout.progress import ProgressLine
from d3s_megatron.rollout.sampling import sample_tokens
from d3s_megatron.types import Request, Rollout

# Leaving the batch copies the cache of the rows that stay; below this share of rows gone the copy costs more than
# the decoding it saves.
_COMPACT_SHARE = 0.25

# Prompt tokens run at once, padding included: bounds the activations of a batch of many long prompts.
_PREFILL_TOKENS = 1 << 15


class TransformersEngine:
    """A RolloutEngine on one device; see `engine.py` for what it promises."""

    def __init__(self, folder: str | Path, config: RolloutConfig, device: str | torch.device = "cpu") -> None:
        """Loads model and tokenizer from a local Hugging Face folder; raises ValueError where it is none."""
        folder = Path(folder)
        if not (folder / "config.json").is_file():
            raise ValueError(f"{folder}: no config.json there; give a local Hugging Face model folder")
        self.config = config
        self.device = torch.device(device)
        self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        dtype = getattr(torch, config.dtype)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        self._model = model.to(self.device).eval().requires_grad_(False)
        self._eos_ids = _eos_ids(self._model, self.tokenizer, folder)
        # The argument was renamed within the supported versions of transformers, and the old name warns.
        names = inspect.signature(self._model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._ready = True

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """One rollout a request, in request order (contract in `engine.py`)."""
        if not self._ready:
            raise RuntimeError("the engine holds no whole set of weights: it was closed, or load_weights failed")
        self._check_lengths(requests, sampling)
        rollouts: dict[int, Rollout] = {}
        progress = ProgressLine(len(requests))
        for batch in self._batches(requests):
            progress.begin(len(rollouts))
            padded_ids, log_probs, lengths, stopped = self._decode([requests[i] for i in batch], sampling, progress)
            ids = [row[:length] for row, length in zip(padded_ids.tolist(), lengths.tolist(), strict=True)]
            texts = self._texts(ids)
            for row, (i, log_prob, stop) in enumerate(zip(batch, log_probs.tolist(), stopped.tolist(), strict=True)):
                rollouts[i] = Rollout(
                    request=requests[i],
                    token_ids=tuple(ids[row]),
                    log_probs=tuple(log_prob[: len(ids[row])]),
                    finish_reason="stop" if stop else "length",
                    text=texts[row],
                )
        return [rollouts[i] for i in range(len(requests))]

    def ask_each(self, requests: Sequence[Request], sampling: Sampling) -> list[tuple[str, Rollout]]:
        """The same as `generate`, for the only engine there is (contract in `engine.py`)."""
        return [("", rollout) for rollout in self.generate(requests, sampling)]

    @torch.no_grad()
    def load_weights(self, stream: Iterable[tuple[str, Tensor]]) -> None:
        """Replaces every weight (contract in `engine.py`)."""
        self._ready = False
        weights = dict(self._model.named_parameters())  # a tied head is listed once, as the embedding
        missing = set(weights)
        for name, tensor in stream:
            if name not in weights:
                raise ValueError(
                    f"weight {name!r} is unknown to {type(self._model).__name__} (a tied head has no name)"
                )
            if name not in missing:
                raise ValueError(f"weight {name!r} came twice in one stream")
            if tensor.shape != weights[name].shape:
                raise ValueError(
                    f"weight {name!r} has shape {tuple(tensor.shape)}; the engine needs {tuple(weights[name].shape)}"
                )
            weights[name].copy_(tensor)
            missing.remove(name)
        if missing:
            raise ValueError(f"{len(missing)} weights never came, among them {sorted(missing)[:3]}; send them all")
        self._ready = True

    def rest(self) -> None:
        """Does nothing: the weights stay where they are, and the cache is gone with each call."""

    def close(self) -> None:
        """Frees the model."""
        self._ready = False
        del self._model

    def _texts(self, ids: list[list[int]]) -> list[str]:
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:  # a tokenizer in Python
            return self.tokenizer.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return backend.decode_batch(ids, skip_special_tokens=True)  # the same without a Python call for every token

    def _check_lengths(self, requests: Sequence[Request], sampling: Sampling) -> None:
        limit = getattr(self._model.config, "max_position_embeddings", None) or sys.maxsize
        for request in requests:
            check_length(request, sampling, limit, "the model's")

    def _batches(self, requests: Sequence[Request]) -> Iterator[list[int]]:
        """Indices into `requests`, at most max_batch_size at a time, prompts of similar length together."""
        order = sorted(range(len(requests)), key=lambda i: _prompt_key(requests[i]))
        for first in range(0, len(order), self.config.max_batch_size):
            yield order[first : first + self.config.max_batch_size]

    @torch.inference_mode()
    def _decode(
        self, requests: Sequence[Request], sampling: Sampling, progress: ProgressLine
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Answers of one batch: ids [B, L], log-probs [B, L], lengths [B], stopped [B]; past a length is garbage."""
        device, batch = self.device, len(requests)
        seeds = torch.tensor([_signed(request.seed) for request in requests], device=device)
        eos_ids = torch.tensor(self._eos_ids, device=device)
        ids = torch.zeros(batch, sampling.max_new_tokens, dtype=torch.int64, device=device)
        log_probs = torch.zeros(batch, sampling.max_new_tokens, device=device)
        lengths = torch.full((batch,), sampling.max_new_tokens, device=device)

        prompts = list(dict.fromkeys(request.prompt.token_ids for request in requests))
        width = max(map(len, prompts))
        logits, cache, pads = self._prefill(prompts, max_tokens=width + sampling.max_new_tokens)
        slot = {prompt: i for i, prompt in enumerate(prompts)}
        source = torch.tensor([slot[request.prompt.token_ids] for request in requests], device=device)
        logits, pads = logits[source], pads[source]
        select_rows(cache, source)
        padded = bool(pads.any())

        rows = torch.arange(batch, device=device)  # the batch rows still decoding
        done = torch.zeros(batch, dtype=torch.bool, device=device)
        for step in range(sampling.max_new_tokens):
            new_ids, new_log_probs = sample_tokens(logits, seeds[rows], step, sampling)
            ids[rows, step], log_probs[rows, step] = new_ids, new_log_probs
            ends = torch.isin(new_ids, eos_ids) & ~done
            lengths[rows[ends]] = step + 1
            done |= ends
            num_done = int(done.sum())
            progress.update(batch - len(rows) + num_done)
            if num_done == len(rows) or step + 1 == sampling.max_new_tokens:
                break
            if num_done >= _COMPACT_SHARE * len(rows):
                stay = (~done).nonzero()[:, 0]
                select_rows(cache, stay)
                rows, pads, new_ids, done = rows[stay], pads[stay], new_ids[stay], done[stay]
            logits = self._forward(new_ids[:, None], width + step, pads, padded, cache)
        last = ids.gather(1, lengths[:, None] - 1)[:, 0]
        return ids, log_probs, lengths, torch.isin(last, eos_ids)

    def _prefill(self, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> tuple[Tensor, Cache, Tensor]:
        """Runs each prompt once, padded on the left: next-token logits [prompts, V], the cache, pads [prompts]."""
        width = max(map(len, prompts))
        ids = torch.tensor([(0,) * (width - len(p)) + p for p in prompts], device=self.device)
        pads = torch.tensor([width - len(p) for p in prompts], device=self.device)
        rows = max(1, _PREFILL_TOKENS // width)
        logits, caches = [], []
        for part_ids, part_pads in zip(ids.split(rows), pads.split(rows), strict=True):
            caches.append(new_cache(self._model.config.num_hidden_layers, max_tokens))
            logits.append(self._forward(part_ids, 0, part_pads, bool(part_pads.any()), caches[-1]))
        return torch.cat(logits), join_rows(caches), pads

    def _forward(self, ids: Tensor, start: int, pads: Tensor, padded: bool, cache: Cache) -> Tensor:
        """Logits [B, V] after ids [B, T] that stand in columns start.. of a row whose first `pads` [B] are padding."""
        end = start + ids.shape[1]
        columns = torch.arange(end, device=self.device)
        logits = self._model(
            input_ids=ids,
            position_ids=(columns[start:] - pads[:, None]).clamp(min=0),
            attention_mask=columns >= pads[:, None] if padded else None,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_name: cache},
        ).logits
        return logits[:, -1]


def _prompt_key(request: Request) -> tuple[int, tuple[int, ...]]:
    return len(request.prompt.token_ids), request.prompt.token_ids


def _signed(seed: int) -> int:
    """A seed of any size as int64, by its low 64 bits."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


def _eos_ids(model: Any, tokenizer: Any, folder: Path) -> list[int]:
    """The ids that end an answer: the folder's generation settings, else its model config, else its tokenizer."""
    for owner in (model.generation_config, model.config, tokenizer):
        ids = getattr(owner, "eos_token_id", None)
        if ids is not None:
            return list(ids) if isinstance(ids, (list, tuple)) else [ids]
    raise ValueError(f"{folder}: no eos_token_id in generation_config.json, config.json or the tokenizer; set one")
