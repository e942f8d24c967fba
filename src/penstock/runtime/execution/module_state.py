"""State of modules and random numbers that a call changes and restores: training mode, random state."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

__all__ = ["RandomStates", "eval_mode", "preserved_rng_state"]


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


class RandomStates:
    """The states of all random number generators that a forward may use: torch's, Python's and numpy's."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        """`devices` are those besides the CPU."""
        self._cpu, self._python, self._numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
        self._devices = {device: torch.get_device_module(device).get_rng_state(device) for device in devices}

    def restore(self) -> None:
        """Set all generators to these states."""
        torch.set_rng_state(self._cpu)
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002
        for device, state in self._devices.items():
            torch.get_device_module(device).set_rng_state(state, device)


@contextmanager
def preserved_rng_state(device: torch.device) -> Iterator[None]:
    """Restore the random states of the CPU and the device at the end."""
    before = RandomStates([] if device.type == "cpu" else [device])
    try:
        yield
    finally:
        before.restore()
