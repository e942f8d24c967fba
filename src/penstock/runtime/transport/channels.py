"""A channel carries the values of one edge in one direction, from a `SendChannel` to a `ReceiveChannel`.

Both ends remember the spec of each microbatch's last message, so a message of the same spec is only its bytes.
When the spec changes, the sender still sends a message of the expected length, with a nonzero flag in it, and
after it the new spec and the data:

    same spec     | flag 0, data |
    new spec      | flag n, ...  |   | n bytes: the spec |   | data |

On devices other than CPUs the host cannot read the flag without waiting for the device, so the flag is sent
separately from host to host.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from penstock.runtime.dtensors import Meshes
from penstock.runtime.pytree import Leaves, Structure
from penstock.runtime.transport.buffer_pool import Buffer, BufferPool
from penstock.runtime.transport.communicator import Communicator, Lane
from penstock.runtime.transport.message_spec import (
    HEADER_BYTES,
    MessageSpec,
    check_sendable,
    message_spec,
    spec_key,
)
from penstock.runtime.transport.transport_errors import Pending, wait

UNLIMITED_BYTES = 2**20
"""As long as the pending messages of a channel are shorter in total, no send waits for an earlier one."""

_Sent: TypeAlias = tuple[Pending, Buffer | Tensor]
"""A pending message and the memory that must stay until it is sent."""


class FlatValue(NamedTuple):
    """A flattened value: leaves, structure, which leaves need gradients, and the buffers that hold them."""

    leaves: Leaves
    structure: Structure
    differentiable: list[bool]
    buffers: tuple[Buffer, ...]


class _Channel:
    """What both ends have: the peer, and the expected specs, first those of training, then those of eval."""

    def __init__(
        self, communicator: Communicator, pool: BufferPool, number: int, peer: int, microbatches: int, name: str
    ) -> None:
        self.communicator, self.pool, self.number, self.peer = communicator, pool, number, peer
        self.name = name
        """What is sent, for error messages."""
        self.specs: list[MessageSpec | None] = [None] * (2 * microbatches)
        self.offset = 0
        """The first slot of the current mode: 0 in training, `microbatches` in eval."""
        self._pending: dict[int, Any] = {}
        self._tags = [
            [communicator.tag(number, slot, lane) for lane in Lane] for slot in range(2 * microbatches)
        ]

    @property
    def max_nbytes(self) -> int:
        """The length of the longest message so far."""
        return max((spec.nbytes for spec in self.specs if spec is not None), default=0)

    def abandon(self) -> None:
        """Release the pending messages and the communicator, after a failed step."""
        self._pending.clear()
        del self.communicator


class SendChannel(_Channel):
    """The sending end."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._pending_bytes = 0

    def send(self, microbatch: int, leaves: Leaves, structure: Structure) -> None:
        """Send the value of this microbatch; returns at once."""
        spec = self.specs[self.offset + microbatch]
        if spec is not None and spec.matches(leaves, structure):
            buffer = self.pool.acquire(spec.nbytes)
            spec.write(buffer.views(spec), leaves)
            sent = self._post(buffer, microbatch, 0)
        else:
            check_sendable(leaves, self.name)
            sent = self._send_with_spec(message_spec(spec_key(leaves, structure)), leaves, microbatch)
        self._pending[microbatch] = sent
        self._pending_bytes += sum(memory.nbytes for _, memory in sent if isinstance(memory, Buffer))

    def _post(self, buffer: Buffer, microbatch: int, flag: int) -> list[_Sent]:
        tags = self._tags[self.offset + microbatch]
        if flag:  # it is 0 in every buffer of the pool
            buffer.flag = flag
        work = self.communicator.send(buffer, self.peer, self.number, tags[Lane.MESSAGE])
        sent: list[_Sent] = [(work, buffer)]
        if not self.communicator.single_group:
            number = torch.tensor([flag])
            sent.append((self.communicator.send_host(number, self.peer, tags[Lane.FLAG]), number))
        return sent

    def _send_with_spec(self, spec: MessageSpec, leaves: Leaves, microbatch: int) -> list[_Sent]:
        """Send a value whose spec the other end does not expect: flag, spec, data."""
        slot, tags = self.offset + microbatch, self._tags[self.offset + microbatch]
        header = torch.frombuffer(bytearray(spec.dumps()), dtype=torch.uint8)
        buffer = self.pool.acquire(spec.nbytes)  # all that can fail here comes before the first message
        spec.write(buffer.views(spec), leaves)
        expected, self.specs[slot] = self.specs[slot], spec
        filler = self.pool.acquire(HEADER_BYTES if expected is None else expected.nbytes)
        flagged = self._post(filler, microbatch, len(header))
        announced = self.communicator.send_host(header, self.peer, tags[Lane.SPEC])
        sent = self.communicator.send(buffer, self.peer, self.number, tags[Lane.DATA])
        return [*flagged, (announced, header), (sent, buffer)]

    def release(self, microbatch: int) -> None:
        """Wait until the message is received, and return its buffers to the pool, unless that is done."""
        for work, memory in self._pending.pop(microbatch, ()):
            wait(work)
            if isinstance(memory, Buffer):
                self._pending_bytes -= memory.nbytes
                self.pool.release(memory)

    def limit(self, microbatch: int) -> None:
        """The same if the pending messages of this channel are long, so that their memory is bounded."""
        if self._pending_bytes > UNLIMITED_BYTES:
            self.release(microbatch)


class ReceiveChannel(_Channel):
    """The receiving end. `meshes` are those that received DTensors can be on."""

    def __init__(self, *arguments: Any, meshes: Meshes) -> None:
        super().__init__(*arguments)
        self._meshes = meshes
        self._received: dict[int, tuple[MessageSpec, Buffer]] = {}
        self._ahead: set[int] = set()
        """The microbatches whose receive is posted before its place in the list."""

    @property
    def held_bytes(self) -> int:
        """Bytes of the messages that the list expects, or that are received and not taken."""
        expected = [each[1] for microbatch, each in self._pending.items() if microbatch not in self._ahead]
        received = [buffer for _, buffer in self._received.values()]
        return sum(buffer.nbytes for buffer in expected + received)

    def post_ahead(self, microbatch: int) -> None:
        """Post a receive before its place in the list, so that its message need not wait for it."""
        self._ahead.add(microbatch)
        self._post(microbatch)

    def post(self, microbatch: int) -> None:
        """Post the receive of this microbatch's value, unless that is done; returns at once."""
        if microbatch in self._ahead:
            self._ahead.remove(microbatch)
        else:
            self._post(microbatch)

    def _post(self, microbatch: int) -> None:
        spec, tags = self.specs[self.offset + microbatch], self._tags[self.offset + microbatch]
        buffer = self.pool.acquire(HEADER_BYTES if spec is None else spec.nbytes)
        work = self.communicator.receive(buffer, self.peer, self.number, tags[Lane.MESSAGE])
        flag = None
        if not self.communicator.single_group:
            number = torch.zeros(1, dtype=torch.int64)
            flag = self.communicator.receive_host(number, self.peer, tags[Lane.FLAG]), number
        self._pending[microbatch] = work, buffer, flag

    def wait(self, microbatch: int) -> None:
        """Wait until the value is received."""
        work, buffer, flag = self._pending[microbatch]
        wait(work)
        if flag is None:
            spec_length = buffer.flag
        else:
            wait(flag[0])
            spec_length = int(flag[1])
        slot = self.offset + microbatch
        if spec_length:
            self.pool.release(buffer)
            self.specs[slot], buffer = self._receive_with_spec(spec_length, microbatch)
        del self._pending[microbatch]
        spec = self.specs[slot]
        assert spec is not None, "received now or with an earlier message"
        self._received[microbatch] = spec, buffer

    def _receive_with_spec(self, length: int, microbatch: int) -> tuple[MessageSpec, Buffer]:
        tags = self._tags[self.offset + microbatch]
        header = torch.empty(length, dtype=torch.uint8)
        wait(self.communicator.receive_host(header, self.peer, tags[Lane.SPEC]))
        spec = MessageSpec.loads(header.numpy().tobytes())
        buffer = self.pool.acquire(spec.nbytes)
        wait(self.communicator.receive(buffer, self.peer, self.number, tags[Lane.DATA]))
        return spec, buffer

    def take(self, microbatch: int) -> FlatValue:
        """The value that `wait` received; the caller releases its buffer."""
        spec, buffer = self._received.pop(microbatch)
        leaves = spec.read(buffer.views(spec), self._meshes)
        return FlatValue(leaves, spec.structure, spec.differentiable, (buffer,))
