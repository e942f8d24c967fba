"""What pipelines and schedules leave behind when the last reference goes, without the garbage collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import mse_loss

from tests.support.resources import descriptors, settled, threads

__all__ = ["NOTHING", "Left", "Loss", "left_behind", "references"]


class Left(NamedTuple):
    """What is left of objects after they were dropped."""

    objects: list[str]
    """Those that are still alive."""
    tensors: int
    """Tensors that only the garbage collector can free."""
    threads: int
    descriptors: int


NOTHING = Left([], 0, 0, 0)


class Loss:
    """A loss that fails when it is told to."""

    fails = False

    def compute(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean squared error, or an exception."""
        if self.fails:
            raise ValueError("told to")
        return mse_loss(output, target)


def references(**objects: Any) -> dict[str, weakref.ref[Any]]:
    """A weak reference to each object."""
    return {name: weakref.ref(each) for name, each in objects.items()}


def left_behind(uses: Mapping[str, Callable[[], Mapping[str, weakref.ref[Any]]]]) -> Left:
    """What is left of the objects that functions create, use and drop; they give weak references to them."""
    next(iter(uses.values()))()  # what is created once and for all
    gc.collect()
    dist.barrier()
    threads_before, descriptors_before = threads(), descriptors()
    gc.disable()
    try:
        alive = [
            f"{use}: {name}"
            for use, function in uses.items()
            for name, reference in function().items()
            if reference() is not None
        ]
        dist.barrier()
        threads_left = settled(lambda: max(0, threads() - threads_before))
        descriptors_left = settled(lambda: max(0, descriptors() - descriptors_before))
        return Left(alive, _tensors_in_cycles(), threads_left, descriptors_left)
    finally:
        gc.enable()


def _tensors_in_cycles() -> int:
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return sum(torch.is_tensor(each) for each in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.collect()
