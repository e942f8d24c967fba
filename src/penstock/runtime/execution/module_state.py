"""What running a module changes besides its result, and how it is put back: buffers, random state, modes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["Undo", "evaluating", "kept_random_state"]


class Undo:
    """What a forward of a module changes, remembered; `undo` puts it back."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
        self._random = torch.get_rng_state()
        self._on_device: Any = torch.get_device_module(device) if device.type != "cpu" else None
        self._random_on_device = self._on_device.get_rng_state() if self._on_device else None

    def undo(self) -> None:
        """As if the forward had not been."""
        torch.set_rng_state(self._random)
        if self._on_device:
            self._on_device.set_rng_state(self._random_on_device)
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)


@contextmanager
def evaluating(modules: Iterable[nn.Module]) -> Iterator[None]:
    """All submodules in eval mode, and back as each was."""
    training = [part for module in modules for part in module.modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


@contextmanager
def kept_random_state(device: torch.device) -> Iterator[None]:
    """Whatever draws random numbers inside leaves no trace outside."""
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"):
        yield
