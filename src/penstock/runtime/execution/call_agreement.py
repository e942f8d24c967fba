"""Compares the calls of the ranks: each announces its call to its peers, and checks theirs before it waits.

The announcement is sent when a call begins, so it has arrived before the first message of that call is needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

import torch

from penstock.errors import PipelineError
from penstock.runtime.failure.agreement import differences, facts_in
from penstock.runtime.transport.communicator import Communicator, ControlMessage
from penstock.runtime.transport.transport_errors import Pending, wait

__all__ = ["CallAgreement", "announced_facts", "announcement"]

_BYTES = 256
_ADVICE = (
    "Every rank must make the same calls of the pipeline in the same order: look for a call that depends on "
    "the rank, a data loader with fewer batches on one rank, or an exception that one rank caught"
)


class CallAgreement:
    """One rank's part. `peers` are the ranks with which it exchanges the messages of the schedule."""

    def __init__(self, communicator: Communicator | None, rank: int, peers: Iterable[int]) -> None:
        self._communicator, self._rank = communicator, rank
        self._received = {peer: torch.zeros(_BYTES, dtype=torch.uint8) for peer in peers}
        self._pending: dict[int, Pending] = {}
        self._own = torch.zeros(0)
        self._sent: list[Pending] = []

    def begin(self, call: Mapping[str, object]) -> None:
        """Announce a call: its name, and everything else that must be the same on all ranks."""
        if (communicator := self._communicator) is None:
            return
        announced = announcement(call)
        tag = communicator.control_tag(ControlMessage.CALL)
        # receives first: a rank that gets an announcement can rely on its own being delivered
        for peer, received in self._received.items():
            self._pending[peer] = communicator.receive_host(received, peer, tag)
        # the announcement of the last call was received, because that call ended on all ranks
        self._own = announced
        self._sent = [communicator.send_host(self._own, peer, tag) for peer in self._received]

    def check(self, peer: int) -> None:
        """Raise unless this rank and its peer make the same call."""
        if peer not in self._pending:
            return
        wait(self._pending.pop(peer))
        if not torch.equal(self._received[peer], self._own):
            raise PipelineError(self._disagreement(peer))

    def check_all(self) -> None:
        """Check the peers that were not checked yet."""
        for peer in list(self._pending):
            self.check(peer)

    def _disagreement(self, peer: int) -> str:
        calls = {self._rank: announced_facts(self._own), peer: announced_facts(self._received[peer])}
        lines = differences({rank: calls[rank] for rank in sorted(calls)})
        return "\n".join(["the ranks of the pipeline do not make the same call:", *lines, _ADVICE])

    def abandon(self) -> None:
        """Release everything that refers to the connections."""
        self._pending.clear()
        self._sent.clear()
        self._communicator = None


def announcement(call: Mapping[str, object], size: int = _BYTES) -> torch.Tensor:
    """The bytes that say which call a rank makes; `size` is the same on all ranks."""
    text = json.dumps(call).encode().ljust(size)
    assert len(text) == size, f"the peers receive {size} bytes, not the {len(text)} of {call}"
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def announced_facts(announced: torch.Tensor) -> dict[str, tuple[object, object]]:
    """The topics of a call and their values, as `differences` takes them."""
    return facts_in(announced.numpy().tobytes())
