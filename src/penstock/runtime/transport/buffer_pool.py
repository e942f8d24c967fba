"""Rows of bytes for messages, used again and again: as many as are in flight, never one per microbatch."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from penstock.runtime.transport.values import PRELUDE, Layout

__all__ = ["Buffer", "Pool"]

_KEPT_LAYOUTS = 4  # of one buffer: outputs and gradients take turns
_KEPT_STEPS = 2  # a buffer that nobody took for so many steps is let go


class Buffer:
    """A row of bytes; `bytes_` is the part that the current message uses."""

    __slots__ = ("_flag", "_own", "_views", "bytes_", "last_step", "row")

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.row = torch.empty(capacity, dtype=torch.uint8, device=device)
        self.bytes_ = self.row
        self.last_step = 0
        self._views: dict[Layout, list[Tensor]] = {}
        # on a CPU the flag is written and read in place; elsewhere it travels by itself
        self._flag: Any = self.row[:8].numpy().view("int64") if device.type == "cpu" else None
        self.flag = 0
        self._own = self._users()

    @property
    def flag(self) -> int:
        """The number at the very front: 0, or the length of the announcement of another layout."""
        return 0 if self._flag is None else int(self._flag[0])

    @flag.setter
    def flag(self, value: int) -> None:
        if self._flag is not None:
            self._flag[0] = value

    def resized(self, nbytes: int) -> Buffer:
        """The same buffer for a message of this length; nobody else may look at it."""
        if len(self.bytes_) != nbytes:
            self.bytes_ = self.row[:nbytes]
            self._own = self._users()
        return self

    def views(self, layout: Layout) -> list[Tensor]:
        """The tensors of a layout in these bytes, kept for the next message; nobody else may look at it yet."""
        views = self._views.get(layout)
        if views is None:
            if len(self._views) == _KEPT_LAYOUTS:
                self._views.clear()
            views = self._views[layout] = layout.views(self.row)
            self._own = self._users()
        return views

    def _users(self) -> int:
        """How many tensors use these bytes, this buffer's own among them."""
        return int(torch._C._storage_Use_Count(self.row.untyped_storage()._cdata))  # noqa: SLF001

    @property
    def holders(self) -> int:
        """How many tensors look at these bytes, besides this buffer's own."""
        return self._users() - self._own


class Pool:
    """Free buffers by capacity."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.in_use = 0
        self.peak = 0
        """The most buffers that were in use at once since `peak` was last set to 0."""
        self._free: defaultdict[int, list[Buffer]] = defaultdict(list)
        self._step = 0

    def take(self, nbytes: int) -> Buffer:
        """A buffer for this many bytes."""
        capacity = _capacity(nbytes)
        free = self._free[capacity]
        buffer = free.pop() if free else Buffer(capacity, self.device)
        buffer.last_step = self._step
        self.in_use += 1
        self.peak = max(self.peak, self.in_use)
        return buffer.resized(nbytes)

    def give(self, buffer: Buffer) -> None:
        """Back for the next message, unless someone still looks at its bytes: then it is theirs."""
        self.in_use -= 1
        if buffer.holders == 0:
            if buffer.flag:
                buffer.flag = 0
            self._free[len(buffer.row)].append(buffer)

    def end_step(self) -> None:
        """Let go what was not needed for a while, so that changing shapes do not fill the memory."""
        self._step += 1
        oldest = self._step - _KEPT_STEPS
        for capacity in list(self._free):
            kept = [buffer for buffer in self._free[capacity] if buffer.last_step >= oldest]
            if kept:
                self._free[capacity] = kept
            else:
                del self._free[capacity]

    @property
    def free(self) -> int:
        """How many buffers wait to be used."""
        return sum(map(len, self._free.values()))


def _capacity(nbytes: int) -> int:
    """Rounded up to an eighth of a power of two, so that nearly equal messages share buffers."""
    grain = max(PRELUDE, 1 << max(nbytes.bit_length() - 4, 0))
    return -(-nbytes // grain) * grain


def tensor_of(text: bytes) -> Tensor:
    """Bytes as a tensor."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
