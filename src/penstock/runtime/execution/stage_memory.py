"""What a stage holds of its microbatches between F and backward: RECOMPUTE, OFFLOAD and RELOAD."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from penstock.runtime.backward.deferral import LayerMode
from penstock.runtime.dtensors import local
from penstock.runtime.execution.microbatch_state import LiveActivations, MicrobatchState, StepInputs
from penstock.runtime.execution.offloading import HostStore, SavedTensors
from penstock.runtime.execution.recomputation import KeptForward, without_saved_tensors
from penstock.runtime.execution.stage_config import StageConfig
from penstock.runtime.pytree import flatten
from penstock.runtime.transport.buffer_pool import Buffer, BufferPool
from penstock.runtime.transport.channels import FlatValue

__all__ = ["StageMemory"]

_NO_HOOKS = nullcontext()


class StageMemory:
    """The microbatches of one stage: what each holds, and those that are recomputed or offloaded."""

    def __init__(
        self,
        index: int,
        module: nn.Module,
        config: StageConfig,
        activations: LiveActivations,
        pool: BufferPool,
    ) -> None:
        self._index, self._config = index, config
        self._modules = [each for each in (module, config.loss) if isinstance(each, nn.Module)]
        """That of the stage, and of its loss if that is a module."""
        self._activations, self._pool = activations, pool
        self.states: dict[int, MicrobatchState] = {}
        """The microbatches that can have their backward."""
        self.counts_bytes = False
        """Whether `held_bytes` will be asked for, so that what F saves has to be known."""
        self._kept: dict[int, KeptForward] = {}
        self._saved: dict[int, SavedTensors] = {}
        self._host = HostStore()
        self._step: StepInputs

    def begin(self, step: StepInputs) -> None:
        """Start a step; discards what a failed step left."""
        self._step = step
        self.states.clear()
        self._kept.clear()
        self._saved.clear()
        self._host.clear()

    def is_recomputed(self, microbatch: int) -> bool:
        """Whether there is a RECOMPUTE for this microbatch."""
        return microbatch in self._config.recomputed_microbatches

    # --- F and RECOMPUTE ---------------------------------------------------------------------------

    def kept_forward(self, microbatch: int, received: FlatValue | None, mode: LayerMode) -> KeptForward | None:
        """What RECOMPUTE needs, if there is one for this microbatch."""
        step = self._step
        if not step.training or not self.is_recomputed(microbatch):
            return None
        args = step.args[self._index][microbatch] if received is None else tuple(received.leaves)
        leaves, _ = flatten((args, dict(step.kwargs[microbatch])))
        return KeptForward(self._modules, mode, received, leaves)

    def hooks(self, microbatch: int, kept: KeptForward | None = None) -> AbstractContextManager[Any]:
        """The hooks on saved tensors under which F, or RECOMPUTE, runs."""
        if kept is not None:
            return without_saved_tensors()
        offloaded = microbatch in self._config.offloaded_microbatches and not self.is_recomputed(microbatch)
        if self._step.training and (self.counts_bytes or offloaded):
            self._saved[microbatch] = SavedTensors()
            return self._saved[microbatch].hooks()
        return _NO_HOOKS

    def finish(self, microbatch: int, kept: KeptForward) -> None:
        """The end of an F that is recomputed."""
        kept.finish(self._index)
        self._kept[microbatch] = kept

    def pop(self, microbatch: int) -> KeptForward:
        """What F kept for RECOMPUTE."""
        return self._kept.pop(microbatch)

    # --- OFFLOAD and RELOAD ------------------------------------------------------------------------

    def offload(self, microbatch: int) -> None:
        """OFFLOAD."""
        if (kept := self._kept.get(microbatch)) is not None:
            self._saved[microbatch], free = kept.offload(self._host)
        else:
            state = self.states[microbatch]
            for leaf in state.inputs:  # only its gradient is asked for: what the backward uses is saved
                own = local(leaf)
                if type(own) is Tensor and own.layout == torch.strided:
                    own.data = torch.empty((), dtype=own.dtype, device=own.device).expand(own.shape)
            buffers, state.inputs_are_held = state.buffers, False
            state.buffers = self._saved[microbatch].offload(self._host, buffers)
            free = tuple(buffer for buffer in buffers if buffer not in state.buffers)
            self._activations.remove()
        for buffer in free:
            self._pool.release(buffer)

    def reload(self, microbatch: int) -> None:
        """RELOAD."""
        self._saved[microbatch].reload(self._host)
        if (kept := self._kept.get(microbatch)) is not None:
            kept.reloaded()
        else:
            self._activations.add()

    # --- bytes -------------------------------------------------------------------------------------

    def held_bytes(self, microbatch: int) -> tuple[int, int]:
        """What a microbatch holds of its forward, and how much of it is input; requires `counts_bytes`.

        Every storage counts once, a message buffer as long as its message. Not counted are parameters, buffers
        of the module, the batch, gradients, outputs that wait to be sent, and the loss itself.
        """
        kept, state = self._kept.get(microbatch), self.states.get(microbatch)
        if kept is not None:
            buffers = () if kept.received is None else kept.received.buffers
            size = _bytes_of(buffers, kept.tensors(), set())
            return size, size
        if state is None:
            return 0, 0
        inputs = state.inputs if state.inputs_are_held else []
        deferred = () if state.jobs is None else state.jobs.inputs()
        saved = self._saved[microbatch].tensors()
        others = set(map(_storage_of, self._lasting_tensors(microbatch)))
        size = _bytes_of(state.buffers, chain(inputs, saved, deferred), others)
        return size, _bytes_of(state.buffers, inputs, others)

    def _lasting_tensors(self, microbatch: int) -> Iterator[Tensor]:
        """What is there before F and after the backward: parameters, buffers, the batch."""
        step = self._step
        batch = [args[microbatch] for args in step.args.values()], dict(step.kwargs[microbatch])
        targets = None if step.targets is None else step.targets[microbatch]
        leaves, _ = flatten((batch, targets))
        owned = (chain(module.parameters(), module.buffers()) for module in self._modules)
        lasting = chain(leaves, *owned)
        yield from (each for each in lasting if isinstance(each, Tensor))


def _bytes_of(buffers: tuple[Buffer, ...], tensors: Iterable[Tensor], others: set[int]) -> int:
    """The bytes of buffers, and of the storages of tensors that are not among the others."""
    found = {_storage_of(buffer.storage): buffer.nbytes for buffer in buffers}
    for tensor in tensors:
        if (storage := _storage_of(tensor)) not in others:
            found.setdefault(storage, local(tensor).untyped_storage().nbytes())
    return sum(found.values())


def _storage_of(tensor: Tensor) -> int:
    return int(local(tensor).untyped_storage()._cdata)  # noqa: SLF001 -- identifies it
