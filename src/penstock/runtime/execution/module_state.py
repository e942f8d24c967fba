"""State that a forward changes besides its result, saved and restored: buffers, random state, training mode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["ForwardSnapshot", "eval_mode", "preserved_rng_state"]


class ForwardSnapshot:
    """The buffers of a module and the random state before a forward; `restore` undoes its changes to them."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
        self._rng_state = torch.get_rng_state()
        self._device_module: Any = torch.get_device_module(device) if device.type != "cpu" else None
        self._device_rng_state = self._device_module.get_rng_state() if self._device_module else None

    def restore(self) -> None:
        """Set everything back."""
        torch.set_rng_state(self._rng_state)
        if self._device_module:
            self._device_module.set_rng_state(self._device_rng_state)
        with torch.no_grad():
            for buffer, saved in self._buffers:
                buffer.copy_(saved)


@contextmanager
def eval_mode(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put all submodules into eval mode, and restore the mode of each."""
    training = [part for module in modules for part in module.modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


@contextmanager
def preserved_rng_state(device: torch.device) -> Iterator[None]:
    """Restore the random state of the CPU and the device at the end."""
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"):
        yield
