"""What an evaluation is asked to do."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from d3s_megatron.data import DataConfig
from d3s_megatron.evaluate.summary import PassKind
from d3s_megatron.rewards import RewardConfig
from d3s_megatron.rollout import RolloutConfig, Sampling

PASS_AT = (1, 8, 16, 32)
BOXED = r"Please reason step by step, and put your final answer within \boxed{}."
SETTINGS_FILE = "settings.json"
_BLOCKS, _BLOCK_BYTES = 64, 4096  # of each weight file that go into its fingerprint


@dataclass(frozen=True)
class Generating:
    """How answers are sampled; two runs into one folder must agree on all of it."""

    model: str  # folder
    engine: Literal["transformers", "vllm"] = "transformers"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    prompt_template: str = "chat"
    system_prompt: str | None = None
    batch_size: int = 64  # answers decoded at once in a process
    memory_share: float = 0.85  # of the device, for vLLM

    @property
    def data(self) -> DataConfig:
        """Prompt rules; a prompt is never dropped, however long."""
        return DataConfig(
            prompt_template=self.prompt_template, system_prompt=self.system_prompt, max_prompt_tokens=1 << 30
        )

    @property
    def rollout(self) -> RolloutConfig:
        """What the engine is made of; sampling goes with every call."""
        return RolloutConfig(
            engine=self.engine, dtype=self.dtype, max_batch_size=self.batch_size, vllm_memory_share=self.memory_share
        )

    def settings(self) -> dict[str, Any]:
        """What settings.json keeps: everything that makes an answer what it is."""
        return {
            "fingerprint": fingerprint(self.model),
            "engine": self.engine,
            "dtype": self.dtype,
            **vars(self.sampling),
            "seed": self.seed,
            "prompt_template": self.prompt_template,
            "system_prompt": self.system_prompt,
        }


@dataclass(frozen=True)
class Scoring:
    """How answers are graded and counted."""

    rewards: RewardConfig = field(default_factory=RewardConfig)
    ks: tuple[int, ...] | None = None  # None: those of PASS_AT up to the number of samples
    pass_kind: PassKind = "unbiased"
    seed: int = 0  # of the bootstrap

    def settings(self) -> dict[str, Any]:
        """What settings.json keeps, so that grading again does the same."""
        ks = ",".join(map(str, self.ks)) if self.ks else None
        return {"reward": self.rewards.kind, "k": ks, "pass_kind": self.pass_kind}

    def ks_for(self, num_samples: int) -> tuple[int, ...]:
        """The k of pass@k and maj@k; always 1, and with fewer samples than 8 their number too."""
        if self.ks is not None:
            if too_large := [k for k in self.ks if not 1 <= k <= num_samples]:
                raise ValueError(f"--k names {too_large[0]}, and there are {num_samples} samples a problem: lower it")
            return tuple(sorted({1, *self.ks}))
        return tuple(k for k in PASS_AT if k <= num_samples) + ((num_samples,) if 1 < num_samples < PASS_AT[1] else ())


def fingerprint(model: str | Path) -> str:
    """What tells the weights of a folder from others of the same shape: config.json and blocks of each weight file.

    The blocks lie all over a file, as the beginning alone (rows of rare tokens) may not have been trained.
    """
    folder = Path(model)
    found = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        size = path.stat().st_size
        found.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for block in range(_BLOCKS):
                file.seek(size * block // _BLOCKS)
                found.update(file.read(_BLOCK_BYTES))
    return found.hexdigest()[:16]


def recommended_sampling(model: str | Path) -> dict[str, Any]:
    """temperature, top_p and top_k where the folder's generation_config.json gives them."""
    path = Path(model) / "generation_config.json"
    if not path.exists():
        return {}
    given = json.loads(path.read_text(encoding="utf-8"))
    return {name: given[name] for name in ("temperature", "top_p", "top_k") if given.get(name) is not None}
