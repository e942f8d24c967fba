"""Send models: what a send and a receive wait for, from the most permissive to the strictest.

    buffered        a send never waits; a step waits until what it needs is sent
    edge-streams    messages move in the background: a message moves once its send and its receive are
                    reached, and those of one channel (ordered pair of ranks) move one after the other
    pair-streams    the same, but the messages between two ranks, both ways, move one after the other, as on
                    one communicator for each pair
    shared-stream   the same, but all messages of a rank, in and out, move one after the other in the order
                    of its list, as on one communicator for all
    rendezvous      a send blocks its rank until the receive is reached, and a receive until the send is

Each blocks wherever the one before it blocks. The order of the members is that order.
"""

from __future__ import annotations

from enum import Enum
from functools import total_ordering

import numpy as np

from penstock.arguments import printable
from penstock.errors import ScheduleError
from penstock.ir.encoding import Ints


@total_ordering
class SendModel(Enum):
    """How sends and receives block; ordered from the most permissive to the strictest."""

    BUFFERED = "buffered"
    EDGE_STREAMS = "edge-streams"
    PAIR_STREAMS = "pair-streams"
    SHARED_STREAM = "shared-stream"
    RENDEZVOUS = "rendezvous"

    @classmethod
    def of(cls, value: SendModel | str) -> SendModel:
        """The model with this name."""
        try:
            return cls(value)
        except ValueError:
            names = ", ".join(model.value for model in cls)
            given = printable(repr(value))
            raise ScheduleError(f"unknown send model {given}; the send models are {names}") from None

    def __str__(self) -> str:
        return self.value

    @property
    def strictness(self) -> int:
        """0 for `buffered`, greater for models that block more."""
        return list(SendModel).index(self)

    def __lt__(self, other: SendModel) -> bool:
        return self.strictness < other.strictness

    @property
    def and_stricter(self) -> tuple[SendModel, ...]:
        """This model and all that block wherever it blocks."""
        return tuple(model for model in SendModel if model >= self)

    @property
    def is_buffered(self) -> bool:
        """Whether a message moves without waiting for its receive."""
        return self is SendModel.BUFFERED

    @property
    def blocks_rank(self) -> bool:
        """Whether a send, and a receive, block their rank until the message has arrived."""
        return self is SendModel.RENDEZVOUS

    def streams(self, source: Ints, target: Ints, num_ranks: int) -> tuple[Ints, Ints]:
        """Per message: the stream it queues in at its sender, and the one at its receiver."""
        if self <= SendModel.EDGE_STREAMS:
            channel = source * num_ranks + target
            return channel, channel + num_ranks * num_ranks
        if self is SendModel.PAIR_STREAMS:
            return source * num_ranks + target, target * num_ranks + source
        return np.asarray(source), np.asarray(target)
