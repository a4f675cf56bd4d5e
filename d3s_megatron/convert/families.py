"""The supported model families: an addition is one file like qwen2.py and one entry here."""

from __future__ import annotations

from d3s_megatron.convert import llama, mistral, qwen2, qwen3
from d3s_megatron.convert.family import Config, Family

FAMILIES = {module.FAMILY.model_type: module.FAMILY for module in (qwen2, qwen3, llama, mistral)}


def family_of(config: Config) -> Family:
    """Family of a config.json; ValueError names the supported ones."""
    supported = ", ".join(f"{family.model_type} ({family.architecture})" for family in FAMILIES.values())
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        raise ValueError(f"model_type is {config.get('model_type')!r}: supported are {supported}")
    architectures = config.get("architectures") or [family.architecture]
    if list(architectures) != [family.architecture]:
        raise ValueError(f"architectures is {list(architectures)}: supported are {supported}")
    return family
