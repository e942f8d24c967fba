"""A pool of byte buffers for messages: as many as are in flight at once, not one per microbatch."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from penstock.runtime.torch_internals.autograd import storage_identity, storage_uses
from penstock.runtime.transport.eager import host_bytes
from penstock.runtime.transport.message_spec import HEADER_BYTES, MessageSpec

_CACHED_SPECS = 4  # per buffer: activations and gradients share buffers
_KEPT_STEPS = 2  # a buffer that is unused for so many steps is freed


class Buffer:
    """A byte tensor; `message` is the part that the current message uses, of length `nbytes`."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.storage = torch.empty(capacity, dtype=torch.uint8, device=device)
        self.message = self.storage
        self.capacity = self.nbytes = capacity  # `len` of a tensor takes microseconds
        self.last_step = 0
        self._views: dict[MessageSpec, list[Tensor]] = {}
        self._identity = storage_identity(self.storage)
        self.host_bytes = host_bytes(self.storage) if device.type == "cpu" else None
        """The memory of the message, on a CPU."""
        # on a CPU the flag is written and read in place; on other devices it is a message of its own
        self._flag = None if self.host_bytes is None else self.host_bytes[:8].cast("q")
        self.flag = 0
        self._address = self.storage.data_ptr()
        self._own = storage_uses(self._identity)
        """How many tensors of this buffer use the storage."""

    @property
    def flag(self) -> int:
        """The first eight bytes: 0, or the length of the new spec that follows this message."""
        return 0 if self._flag is None else self._flag[0]

    @flag.setter
    def flag(self, value: int) -> None:
        if self._flag is not None:
            self._flag[0] = value

    def resized(self, nbytes: int) -> Buffer:
        """The same buffer for a message of this length. Requires that there are no external references."""
        if self.nbytes != nbytes:
            self.message, self.nbytes = self.storage[:nbytes], nbytes
            if self.host_bytes is not None:
                self.host_bytes = host_bytes(self.message)
            self._own = storage_uses(self._identity)
        return self

    def views(self, spec: MessageSpec) -> list[Tensor]:
        """The tensors of a spec in this buffer, cached. Requires that there are no external references."""
        views = self._views.get(spec)
        if views is None:
            if len(self._views) == _CACHED_SPECS:
                self._views.clear()
            views = self._views[spec] = spec.views(self.storage)
            self._own = storage_uses(self._identity)
        return views

    @property
    def external_references(self) -> int:
        """How many tensors use the storage, those of this buffer excluded."""
        return storage_uses(self._identity) - self._own

    @property
    def is_moved(self) -> bool:
        """Whether the storage has other memory now, as after `share_memory_()` of a tensor that uses it."""
        return self.storage.data_ptr() != self._address


class BufferPool:
    """Free buffers by capacity."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.in_use = 0
        self.peak = 0
        """The most buffers in use at once since `peak` was set to 0."""
        self._free: defaultdict[int, list[Buffer]] = defaultdict(list)
        self._step = 0

    def acquire(self, nbytes: int) -> Buffer:
        """A buffer for this many bytes."""
        capacity = _capacity(nbytes)
        free = self._free[capacity]
        buffer = free.pop() if free else Buffer(capacity, self.device)
        buffer.last_step = self._step
        self.in_use += 1
        self.peak = max(self.peak, self.in_use)
        return buffer.resized(nbytes)

    def release(self, buffer: Buffer) -> None:
        """Return a buffer to the pool, which forgets one that is moved or that external references keep."""
        self.in_use -= 1
        if buffer.external_references == 0 and not buffer.is_moved:
            if buffer.flag:
                buffer.flag = 0
            self._free[buffer.capacity].append(buffer)

    def end_step(self) -> None:
        """Free buffers that were not used for some steps, so that changing shapes do not fill the memory."""
        self._step += 1
        oldest = self._step - _KEPT_STEPS
        for capacity in list(self._free):
            free = self._free.pop(capacity)
            if kept := [buffer for buffer in free if buffer.last_step >= oldest]:
                self._free[capacity] = kept

    @property
    def free(self) -> int:
        """How many buffers are free."""
        return sum(map(len, self._free.values()))


def _capacity(nbytes: int) -> int:
    """Rounded up to an eighth of a power of two, so that messages of similar length share buffers."""
    grain = max(HEADER_BYTES, 1 << max(nbytes.bit_length() - 4, 0))
    return -(-nbytes // grain) * grain
