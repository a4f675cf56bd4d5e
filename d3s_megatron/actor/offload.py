"""Optimizer state, main weights and gradient buffers on the host while rollouts need the GPU's memory.

Left out on purpose: the model's own weights, which the next score reads and the weight sync streams; and pinned
memory, whose allocation costs more than it saves for one copy a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor


class HostOffload:
    """Moves what only `update` needs to the host and back.

    Args:
        optimizer: megatron-core's, chained or not.
        ddp: the wrapped chunks, whose gradient buffers are freed and made anew.
        has_main_weights: the optimizer keeps float32 copies of its own (bfloat16 training).
        device: where training runs.
    """

    def __init__(
        self, optimizer: Any, ddp: Sequence[DistributedDataParallel], has_main_weights: bool, device: torch.device
    ) -> None:
        self._optimizers = [part.optimizer for part in getattr(optimizer, "chained_optimizers", [optimizer])]
        self._ddp, self._has_main_weights, self._device = ddp, has_main_weights, device
        self._moved: list[tuple[dict[str, Any], str]] = []
        self.is_offloaded = False

    def offload(self) -> None:
        """To the host; does nothing where it is there already."""
        if self.is_offloaded:
            return
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                for name, value in state.items():
                    # Step counts have no dimension and stay where the optimizer made them.
                    if isinstance(value, Tensor) and value.dim() and value.device.type == self._device.type:
                        state[name] = value.cpu()
                        self._moved.append((state, name))
        self._move_main_weights(torch.device("cpu"))
        for chunk in self._ddp:
            chunk.offload_grad_buffers()
        self.is_offloaded = True

    def restore(self) -> None:
        """Back to the device, gradients zero; does nothing where it is there already."""
        if not self.is_offloaded:
            return
        for chunk in self._ddp:
            chunk.restore_grad_buffers()
        self._move_main_weights(self._device)
        for state, name in self._moved:
            state[name] = state[name].to(self._device)
        self._moved.clear()
        self.is_offloaded = False

    def _move_main_weights(self, device: torch.device) -> None:
        if not self._has_main_weights:
            return
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for weight in group["params"]:
                    weight.data = weight.data.to(device)
