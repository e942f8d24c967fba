"""A channel carries the values of one edge one way: an outbox on the sending rank, an inbox on the other.

Both ends remember the layout of each microbatch's last message, so a message of the same layout is one row of
bytes and nothing else. When the layout changes, the sender fills the message that the receiver expects with a
flag alone, and sends after it what the new layout is and then the data:

    same layout       | flag 0, data |
    another layout    | flag n, ...  |   | n bytes: the layout |   | data |

Where the device is not a CPU, the host cannot look at the flag without waiting for the device, so the flag goes
from host to host by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.runtime.dtensors import Meshes
from penstock.runtime.transport.buffer_pool import Buffer, Pool, tensor_of
from penstock.runtime.transport.links import DATA, EDGE_DATA, FLAG, HEADER, Links
from penstock.runtime.transport.values import (
    PRELUDE,
    Layout,
    Leaves,
    Structure,
    describe,
    layout_of,
    refuse_unsendable,
)

__all__ = ["Inbox", "Outbox", "Parcel"]


_Sent: TypeAlias = tuple[dist.Work, Buffer | Tensor]
"""A message under way and the bytes that must stay until it has left."""


class Parcel(NamedTuple):
    """A value taken apart: its leaves, how they hang together, which get gradients, and where its bytes are."""

    leaves: Leaves
    structure: Structure
    differentiable: list[bool]
    buffer: Buffer | None


class _End:
    """What both ends have: the peer, the layouts that are expected, for training and behind that for eval."""

    def __init__(self, links: Links, pool: Pool, number: int, peer: int, microbatches: int, what: str) -> None:
        self.links, self.pool, self.number, self.peer, self.what = links, pool, number, peer, what
        self.expected: list[Layout | None] = [None] * (2 * microbatches)
        self.mode = 0
        """Where the layouts of this mode begin: 0 for training, `microbatches` for eval."""
        self._under_way: dict[int, Any] = {}
        self._tags = [[links.tag(number, slot, lane) for lane in range(4)] for slot in range(2 * microbatches)]

    def drop(self) -> None:
        """Let go of everything under way, and of the connection: the step failed."""
        self._under_way.clear()
        del self.links


class Outbox(_End):
    """The sending end. `source` gives the leaves and the structure of a microbatch's value."""

    def __init__(self, *given: Any, source: Callable[[int], tuple[Leaves, Structure]]) -> None:
        super().__init__(*given)
        self._source = source

    def send(self, microbatch: int) -> None:
        """Send the value of this microbatch; returns at once."""
        leaves, structure = self._source(microbatch)
        layout = self.expected[self.mode + microbatch]
        if layout is not None and layout.fits(leaves, structure):
            buffer = self.pool.take(layout.nbytes)
            layout.write(buffer.views(layout), leaves)
            sent = self._post(buffer, microbatch, 0)
        else:
            refuse_unsendable(leaves, self.what)
            sent = self._announced(layout_of(describe(leaves, structure)), leaves, microbatch)
        self._under_way[microbatch] = sent

    def _post(self, buffer: Buffer, microbatch: int, flag: int) -> list[_Sent]:
        tags = self._tags[self.mode + microbatch]
        if flag:  # it is down in every buffer of the pool
            buffer.flag = flag
        sent: list[_Sent] = [(self.links.send(buffer.bytes_, self.peer, self.number, tags[EDGE_DATA]), buffer)]
        if not self.links.one_group:
            number = torch.tensor([flag])
            sent.append((self.links.send_host(number, self.peer, tags[FLAG]), number))
        return sent

    def _announced(self, layout: Layout, leaves: Leaves, microbatch: int) -> list[_Sent]:
        """A layout that the other end does not expect: flag, layout, data."""
        slot, tags = self.mode + microbatch, self._tags[self.mode + microbatch]
        expected, self.expected[slot] = self.expected[slot], layout
        header = tensor_of(layout.dumps())
        filler = self.pool.take(PRELUDE if expected is None else expected.nbytes)
        flagged = self._post(filler, microbatch, len(header))
        told = self.links.send_host(header, self.peer, tags[HEADER])
        buffer = self.pool.take(layout.nbytes)
        layout.write(buffer.views(layout), leaves)
        sent = self.links.send(buffer.bytes_, self.peer, self.number, tags[DATA])
        return [*flagged, (told, header), (sent, buffer)]

    def release(self, microbatch: int) -> None:
        """The message was received, so its buffer is free again; where that is certain, this does not wait."""
        for work, held in self._under_way.pop(microbatch):
            work.wait()
            if isinstance(held, Buffer):
                self.pool.give(held)


class Inbox(_End):
    """The receiving end. `meshes` are those that DTensors can be put together on."""

    def __init__(self, *given: Any, meshes: Meshes) -> None:
        super().__init__(*given)
        self._meshes = meshes
        self._arrived: dict[int, tuple[Layout, Buffer]] = {}

    def post(self, microbatch: int) -> None:
        """Get ready for the value of this microbatch; returns at once."""
        layout, tags = self.expected[self.mode + microbatch], self._tags[self.mode + microbatch]
        buffer = self.pool.take(PRELUDE if layout is None else layout.nbytes)
        work = self.links.receive(buffer.bytes_, self.peer, self.number, tags[EDGE_DATA])
        flag = None
        if not self.links.one_group:
            number = torch.zeros(1, dtype=torch.int64)
            flag = self.links.receive_host(number, self.peer, tags[FLAG]), number
        self._under_way[microbatch] = work, buffer, flag

    def wait(self, microbatch: int) -> None:
        """Wait until the value is there."""
        work, buffer, flag = self._under_way[microbatch]
        work.wait()
        if flag is None:
            announced = buffer.flag
        else:
            flag[0].wait()
            announced = int(flag[1])
        slot = self.mode + microbatch
        if announced:
            self.pool.give(buffer)
            self.expected[slot], buffer = self._announced(announced, microbatch)
        del self._under_way[microbatch]
        layout = self.expected[slot]
        assert layout is not None, "announced, now or before"
        self._arrived[microbatch] = layout, buffer

    def _announced(self, length: int, microbatch: int) -> tuple[Layout, Buffer]:
        tags = self._tags[self.mode + microbatch]
        header = torch.empty(length, dtype=torch.uint8)
        self.links.receive_host(header, self.peer, tags[HEADER]).wait()
        layout = Layout.loads(header.numpy().tobytes())
        buffer = self.pool.take(layout.nbytes)
        self.links.receive(buffer.bytes_, self.peer, self.number, tags[DATA]).wait()
        return layout, buffer

    def take(self, microbatch: int) -> Parcel:
        """The value that `wait` waited for; whoever takes it gives its buffer back."""
        layout, buffer = self._arrived.pop(microbatch)
        leaves = layout.read(buffer.views(layout), self._meshes)
        return Parcel(leaves, layout.structure, layout.differentiable, buffer)
