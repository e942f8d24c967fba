"""What F keeps for RECOMPUTE: its input, random states and changed buffers, and no saved tensors.

F records its graph as always, so it computes the same bits, but the tensors that the graph would save are
dropped at once, and the graph at the end of F. RECOMPUTE runs the module again on the same input, with the
random states and the buffers that F began with, and keeps the graph; afterwards both are as before it.
Autocast is the same, because both run in one step. Other state of a module, such as a counter, is not restored.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from penstock.errors import PipelineError
from penstock.runtime.backward.deferral import LayerMode
from penstock.runtime.execution.offloading import HostStore, Offloadable, SavedTensors
from penstock.runtime.transport.buffer_pool import Buffer
from penstock.runtime.transport.channels import FlatValue

__all__ = ["KeptForward", "without_saved_tensors"]


def without_saved_tensors() -> saved_tensors_hooks:
    """While active, autograd saves nothing for backward."""
    return saved_tensors_hooks(lambda _: None, _was_dropped)


def _was_dropped(_: object) -> NoReturn:
    raise PipelineError(
        "a backward uses the graph of a forward whose saved tensors were dropped, because the schedule "
        "recomputes it: the module keeps a tensor with its graph from one forward to another; detach it, or "
        "leave out the RECOMPUTE actions of its stage"
    )


class KeptForward:
    """What is kept of one microbatch from F to RECOMPUTE; created before F runs."""

    def __init__(
        self, module: nn.Module, mode: LayerMode, received: FlatValue | None, leaves: Sequence[object]
    ) -> None:
        """`leaves` are those of all inputs of the module."""
        self.mode = mode
        self.received = None if received is None else received._replace(leaves=list(received.leaves))
        """The output of the stages before it; None for a stage that gets the batch."""
        self._offloaded: dict[int, Offloadable] = {}
        self._inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_inference()]
        self._versions = [leaf._version for leaf in self._inputs]  # noqa: SLF001 -- counts changes in place
        self._devices = {p.device for p in module.parameters() if p.device.type not in ("cpu", "meta")}
        self._random = _RandomStates(self._devices)
        self._present = dict(module.named_buffers())
        self._buffers = {name: buffer.clone() for name, buffer in self._present.items()}

    def finish(self, module: nn.Module, stage: int) -> None:
        """After F: check that the input is as it was, and keep only the buffers that F has changed."""
        if [leaf._version for leaf in self._inputs] != self._versions:  # noqa: SLF001
            raise PipelineError(
                f"stage {stage} changes its input in place, so its forward cannot be recomputed: change a "
                f"clone() of it, or leave out the RECOMPUTE actions of stage {stage}"
            )
        for name, buffer in module.named_buffers():
            # values are compared, because batch norm changes its statistics without counting a version
            if buffer is self._present.get(name) and torch.equal(buffer, self._buffers[name]):
                del self._buffers[name]
        self._inputs, self._present = [], {}

    def offload(self, host: HostStore) -> tuple[SavedTensors, tuple[Buffer, ...]]:
        """Move the input to the host, and give the message buffers that are free then.

        The input of a stage that gets the batch stays where it is.
        """
        self._offloaded = {}
        if self.received is None:
            return SavedTensors(), ()
        leaves, buffers = self.received.leaves, self.received.buffers
        for position in [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]:
            self._offloaded[position] = Offloadable.of(leaves[position])
            leaves[position] = None
        moved = SavedTensors(self._offloaded.values())
        in_use = moved.offload(host, buffers)
        self.received = self.received._replace(buffers=in_use)
        return moved, tuple(buffer for buffer in buffers if buffer not in in_use)

    def tensors(self) -> Iterator[Tensor]:
        """What is held and not on the host: the input, and the buffers that F has changed."""
        yield from self._buffers.values()
        yield from (entry.tensor for entry in self._offloaded.values() if entry.tensor is not None)
        if self.received is not None:
            yield from (leaf for leaf in self.received.leaves if isinstance(leaf, Tensor))

    def reloaded(self) -> None:
        """After RELOAD: the input is back."""
        for position, entry in self._offloaded.items():
            assert self.received is not None
            self.received.leaves[position] = entry.value
        self._offloaded = {}

    @contextmanager
    def restored(self, module: nn.Module) -> Iterator[None]:
        """Run with the random states and buffers that F began with."""
        now = _RandomStates(self._devices)
        self._random.restore()
        current = _exchanged(module, self._buffers)
        try:
            yield
        finally:
            _exchanged(module, current)
            now.restore()


class _RandomStates:
    """The states of all random number generators that a forward may use."""

    def __init__(self, devices: set[torch.device]) -> None:
        self._cpu, self._python, self._numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
        self._devices = {device: torch.get_device_module(device).get_rng_state(device) for device in devices}

    def restore(self) -> None:
        """Set all generators to these states."""
        torch.set_rng_state(self._cpu)
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002
        for device, state in self._devices.items():
            torch.get_device_module(device).set_rng_state(state, device)


def _exchanged(module: nn.Module, buffers: Mapping[str, Any]) -> dict[str, Any]:
    """Put these buffers into the module, and give those that were there."""
    before = {}
    for path, buffer in buffers.items():
        owner_path, _, name = path.rpartition(".")
        owner = module.get_submodule(owner_path)._buffers  # noqa: SLF001 -- assigning would check the type
        before[path], owner[name] = owner[name], buffer
    return before
