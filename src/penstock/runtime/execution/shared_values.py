"""Values that several stages of a rank use, until each of them has its own.

A message is a copy, but stages on the same rank would get the same tensors, and one of them may change its
input in place. So a stage takes a copy as long as another one still needs the value, and the last one takes the
value itself.
"""

from __future__ import annotations

from collections.abc import Collection

from penstock.runtime.execution.handover import Envelope, copied_leaves
from penstock.runtime.execution.joined_inputs import Source
from penstock.runtime.pytree import Leaves
from penstock.runtime.transport.channels import FlatValue

__all__ = ["SharedInputs", "SharedOutputs"]


class SharedOutputs:
    """The outputs of one stage by microbatch. `consumers` are the stages that take them, on any rank."""

    def __init__(self, consumers: Collection[int]) -> None:
        self.consumers = tuple(consumers)
        self._values: dict[int, tuple[Leaves, Envelope, set[int]]] = {}

    def put(self, microbatch: int, leaves: Leaves, envelope: Envelope) -> None:
        """Keep the output of a microbatch for all consumers."""
        self._values[microbatch] = leaves, envelope, set(self.consumers)

    def send(self, microbatch: int, consumer: int) -> tuple[Leaves, Envelope]:
        """The value for a message, which copies it."""
        leaves, envelope, waiting = self._values[microbatch]
        waiting.remove(consumer)
        if not waiting:
            del self._values[microbatch]
        return leaves, envelope

    def take(self, microbatch: int, consumer: int) -> tuple[Leaves, Envelope]:
        """The value for a stage on the same rank, which owns it."""
        leaves, envelope = self.send(microbatch, consumer)
        return (copied_leaves(leaves) if microbatch in self._values else leaves), envelope

    def clear(self) -> None:
        """Discard all values."""
        self._values.clear()


class SharedInputs:
    """The values of one receive channel, which several stages of this rank use."""

    def __init__(self, source: Source, consumers: Collection[int]) -> None:
        self._source, self._consumers = source, tuple(consumers)
        self._values: dict[int, tuple[FlatValue, set[int]]] = {}

    @property
    def held_bytes(self) -> int:
        """Bytes of the messages that one of the stages has still to use."""
        return sum(buffer.nbytes for value, _ in self._values.values() for buffer in value.buffers)

    def take(self, consumer: int, microbatch: int) -> FlatValue:
        """The value for one of the stages, which owns it."""
        if microbatch not in self._values:
            self._values[microbatch] = self._source(microbatch), set(self._consumers)
        value, waiting = self._values[microbatch]
        waiting.remove(consumer)
        if waiting:
            return value._replace(leaves=copied_leaves(value.leaves), buffers=())
        del self._values[microbatch]
        return value
