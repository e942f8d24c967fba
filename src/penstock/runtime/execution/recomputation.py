"""What F keeps for RECOMPUTE: its input, random states and changed buffers, and no saved tensors.

F records its graph as always, so it computes the same bits, but the tensors that the graph would save are
dropped at once, and the graph at the end of F. RECOMPUTE runs the module again on the same input, with the
random states and the buffers that F began with, and keeps the graph; afterwards both are as before it.
Autocast is the same, because both run in one step. Other state of a module, such as a counter, is not restored;
if it changes the result, the two results differ, which is found on CPUs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from penstock.errors import PipelineError
from penstock.runtime.backward.deferral import LayerMode
from penstock.runtime.data_parallel.checksums import checksum
from penstock.runtime.dtensors import local
from penstock.runtime.execution.handover import is_plain
from penstock.runtime.execution.module_state import RandomStates
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
        self,
        modules: Sequence[nn.Module],
        mode: LayerMode,
        received: FlatValue | None,
        leaves: Sequence[object],
    ) -> None:
        """`modules` are that of the stage and of its loss, `leaves` those of all inputs of the stage."""
        self.mode = mode
        self._modules = tuple(modules)
        self.received = None if received is None else received._replace(leaves=list(received.leaves))
        """The output of the stages before it; None for a stage that gets the batch."""
        self._offloaded: dict[int, Offloadable] = {}
        self._inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_inference()]
        self._versions = [leaf._version for leaf in self._inputs]  # noqa: SLF001 -- counts changes in place
        parameters = (parameter for module in self._modules for parameter in module.parameters())
        self._devices = {p.device for p in parameters if p.device.type not in ("cpu", "meta")}
        self._random = RandomStates(self._devices)
        self._present = _buffers_of(self._modules)
        self._buffers = {place: buffer.clone() for place, buffer in self._present.items()}
        self._results: list[int | str] = []

    def keep_results(self, results: Iterable[Any]) -> None:
        """F has computed these; RECOMPUTE must compute the same."""
        self._results = _checksums(results)

    def check_results(self, results: Iterable[Any], stage: int, microbatch: int) -> None:
        """Raise if RECOMPUTE has computed something else than F: its gradients would be those of this."""
        if _checksums(results) != self._results:
            raise PipelineError(
                f"stage {stage}: RECOMPUTE of microbatch {microbatch} gives another result than its F, so the "
                "gradients would be wrong: the forward uses something that changes from call to call, such as "
                "a counter or a random generator of its own. Keep a counter in a buffer, use torch's default "
                f"generator, or leave out the RECOMPUTE actions of stage {stage}"
            )

    def finish(self, stage: int) -> None:
        """After F: check that the input is as it was, and keep only the buffers that F has changed."""
        if [leaf._version for leaf in self._inputs] != self._versions:  # noqa: SLF001
            raise PipelineError(
                f"stage {stage} changes its input in place, so its forward cannot be recomputed: change a "
                f"clone() of it, or leave out the RECOMPUTE actions of stage {stage}"
            )
        for place, buffer in _buffers_of(self._modules).items():
            # values are compared, because batch norm changes its statistics without counting a version
            if buffer is self._present.get(place) and torch.equal(buffer, self._buffers[place]):
                del self._buffers[place]
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
    def restored(self) -> Iterator[None]:
        """Run with the random states and buffers that F began with."""
        now = RandomStates(self._devices)
        self._random.restore()
        current = _exchanged(self._modules, self._buffers)
        try:
            yield
        finally:
            _exchanged(self._modules, current)
            now.restore()


_COMPARED = (bool, int, float, str, bytes)
"""What is compared besides tensors; other objects need not be equal to a copy."""


def _checksums(results: Iterable[Any]) -> list[int | str]:
    """Of tensors on CPUs, numbers and texts; kernels of other devices may round differently each time."""
    found: list[int | str] = []
    for each in results:
        if type(each) in _COMPARED:
            found.append(repr(each))
        elif isinstance(each, Tensor) and each.device.type == "cpu" and is_plain(local(each)):
            found.append(int(checksum(each.detach().resolve_conj().resolve_neg())))
    return found


_Place: TypeAlias = tuple[int, str]
"""Where a buffer is: the number of its module, and its name there."""


def _buffers_of(modules: Sequence[nn.Module]) -> dict[_Place, Tensor]:
    return {
        (number, name): buffer
        for number, module in enumerate(modules)
        for name, buffer in module.named_buffers()
    }


def _exchanged(modules: Sequence[nn.Module], buffers: Mapping[_Place, Any]) -> dict[_Place, Any]:
    """Put these buffers into the modules, and give those that were there."""
    before = {}
    for place, buffer in buffers.items():
        owner_path, _, name = place[1].rpartition(".")
        owner = modules[place[0]].get_submodule(owner_path)._buffers  # noqa: SLF001 -- assigning checks the type
        before[place], owner[name] = owner[name], buffer
    return before
