"""A forward that can be undone: random state and buffers as they were before it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["Undo"]


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
