"""What a stage holds of its microbatches between F and backward: RECOMPUTE, OFFLOAD and RELOAD."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from penstock.runtime.backward.deferral import LayerMode
from penstock.runtime.execution.microbatch_state import LiveActivations, StepInputs
from penstock.runtime.execution.offloading import HostStore, SavedTensors
from penstock.runtime.execution.recomputation import KeptForward, without_saved_tensors
from penstock.runtime.execution.stage_config import StageConfig
from penstock.runtime.pytree import flatten
from penstock.runtime.transport.buffer_pool import BufferPool
from penstock.runtime.transport.channels import FlatValue

__all__ = ["StageMemory"]


class StageMemory:
    """The microbatches of one stage that are recomputed or offloaded."""

    def __init__(
        self,
        index: int,
        module: nn.Module,
        config: StageConfig,
        activations: LiveActivations,
        pool: BufferPool,
    ) -> None:
        self._index, self._module, self._config = index, module, config
        self._activations, self._pool = activations, pool
        self._kept: dict[int, KeptForward] = {}
        self._saved: dict[int, SavedTensors] = {}
        self._host = HostStore()

    def clear(self) -> None:
        """Discard what a failed step left."""
        self._kept.clear()
        self._saved.clear()
        self._host.clear()

    def kept_forward(
        self, step: StepInputs, microbatch: int, received: FlatValue | None, mode: LayerMode
    ) -> KeptForward | None:
        """What RECOMPUTE needs, if there is one for this microbatch."""
        if not step.training or microbatch not in self._config.recomputed_microbatches:
            return None
        args = step.args[self._index][microbatch] if received is None else tuple(received.leaves)
        leaves, _ = flatten((args, dict(step.kwargs[microbatch])))
        return KeptForward(self._module, mode, received, leaves)

    def hooks(self, step: StepInputs, microbatch: int, kept: KeptForward | None) -> AbstractContextManager[Any]:
        """The hooks on saved tensors under which F runs."""
        if kept is not None:
            return without_saved_tensors()
        if step.training and microbatch in self._config.offloaded_microbatches:
            self._saved[microbatch] = SavedTensors()
            return self._saved[microbatch].hooks()
        return nullcontext()

    def finish(self, microbatch: int, kept: KeptForward) -> None:
        """The end of an F that is recomputed."""
        kept.finish(self._module, self._index)
        self._kept[microbatch] = kept

    def pop(self, microbatch: int) -> KeptForward:
        """What F kept for RECOMPUTE."""
        return self._kept.pop(microbatch)

    def offload(self, microbatch: int) -> None:
        """OFFLOAD."""
        if (kept := self._kept.get(microbatch)) is not None:
            self._saved[microbatch] = kept.offload(self._host, self._pool)
            return
        self._saved[microbatch].offload(self._host)
        self._activations.remove()

    def reload(self, microbatch: int) -> None:
        """RELOAD."""
        self._saved.pop(microbatch).reload(self._host)
        if (kept := self._kept.get(microbatch)) is not None:
            kept.reloaded()
        else:
            self._activations.add()
