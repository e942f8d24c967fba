"""State of modules and random numbers that a call changes and restores: training mode, random state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

__all__ = ["eval_mode", "preserved_rng_state"]


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
