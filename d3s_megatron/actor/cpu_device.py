"""Lets megatron-core run where there is no GPU; nothing here does anything where `torch.cuda.is_available()`.

megatron-core names the CUDA device in many places. `install` replaces the few module functions that would raise,
once, and `as_cpu` is the context in which the actor calls megatron: inside it `device="cuda"` means the CPU.
Left out on purpose: CUDA generators. Dropout is 0 here, and megatron's inference RNG tracker, whose fork does
nothing, stands in for the real one (see parallel.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel import layers, random
from torch import Tensor
from torch.overrides import TorchFunctionMode

from d3s_megatron.ops import accumulate

CPU = torch.device("cpu")
_CUDA, _TYPE = torch.Tensor.cuda, torch.Tensor.type


def needed() -> bool:
    """True where megatron-core has to be told that the CPU is its device."""
    return not torch.cuda.is_available()


class _Inert:
    """Stands in for a CUDA stream or event: every method exists and does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _Inert:
        return self

    def __exit__(self, *args: Any) -> None:
        return None

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        return None

    wait_stream = wait_event = wait = record = record_event = synchronize = _nothing


class _WeightGradients:
    """Stands in for NVIDIA Apex's kernel: the product is added into the gradient buffer, with no copy in between."""

    @staticmethod
    def wgrad_gemm_accum_fp32(inputs: Tensor, grad: Tensor, total: Tensor) -> None:
        """total [out, in] += grad [T, out].T @ inputs [T, in]."""
        accumulate.add_product(total, grad.t(), inputs)


def _is_cuda(value: Any) -> bool:
    kind = type(value)
    return (kind is str and value.startswith("cuda")) or (kind is torch.device and value.type == "cuda")


class _CpuForCuda(TorchFunctionMode):
    """Turns the CUDA device into the CPU in every torch call made inside the mode; a step makes thousands of them."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is _CUDA:
            return args[0]
        if func is _TYPE and len(args) == 1 and not kwargs:
            # The optimizers sort parameters by this string and refuse what they do not know.
            return func(*args).replace("torch.", "torch.cuda.", 1)
        for arg in args:
            if _is_cuda(arg):
                args = tuple(CPU if _is_cuda(arg) else arg for arg in args)
                break
        if not kwargs:
            return func(*args)
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs = {**kwargs, "device": CPU}
        return func(*args, **kwargs)


def install() -> None:
    """Makes the module functions of torch.cuda that megatron-core calls harmless; does nothing on a GPU machine."""
    if not needed():
        return
    cuda: Any = torch.cuda
    cuda.current_device = lambda: CPU  # pipeline buffers and parameters are made on it
    cuda.synchronize = lambda *args, **kwargs: None
    cuda.current_stream = lambda *args, **kwargs: _Inert()  # 0.19 asks for streams; a CUDA build would raise
    cuda.default_stream = lambda *args, **kwargs: _Inert()
    cuda.Stream = cuda.stream = cuda.Event = _Inert
    layers.fused_weight_gradient_mlp_cuda = _WeightGradients
    layers._grad_accum_fusion_available = True
    # Activation recompute keeps the CUDA generator's state; with dropout 0 there is nothing to keep.
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.zeros(0, dtype=torch.uint8)
    random._set_cuda_rng_state = lambda *args, **kwargs: None


@contextlib.contextmanager
def as_cpu() -> Iterator[None]:
    """The context of every call into megatron-core; a no-op on a GPU machine."""
    if not needed():
        yield
        return
    with _CpuForCuda():
        yield


def plain_torch() -> contextlib.AbstractContextManager[None]:
    """Inside `as_cpu`: for a stretch that never names a device, at half the time a small torch call takes there."""
    return torch._C.DisableTorchFunction() if needed() else contextlib.nullcontext()
