"""Compares the calls of the ranks: each announces its call to its peers, and checks theirs before it waits.

The announcement is sent when a call begins, so it has arrived before the first message of that call is needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from penstock.errors import PipelineError
from penstock.runtime.failure.agreement import differences
from penstock.runtime.transport.communicator import Communicator, ControlMessage
from penstock.runtime.transport.transport_errors import wait

__all__ = ["CallAgreement"]

_BYTES = 384
_HEADING = "the ranks of the pipeline do not make the same call:"
_ADVICE = (
    "Every rank must make the same calls of the pipeline in the same order: look for a call that depends on "
    "the rank, a data loader with fewer batches on one rank, or an exception that one rank caught"
)


class CallAgreement:
    """One rank's part. `peers` are the ranks with which it compares, `names` their numbers in messages."""

    def __init__(
        self,
        communicator: Communicator | None,
        rank: int,
        peers: Iterable[int],
        names: Sequence[int] | None = None,
        texts: tuple[str, str] = (_HEADING, _ADVICE),
    ) -> None:
        """`texts` come before and after the differences of two ranks."""
        self._communicator, self._rank = communicator, rank
        self._names, self._texts = names, texts
        self._received = {peer: torch.zeros(_BYTES, dtype=torch.uint8) for peer in peers}
        self._pending: dict[int, dist.Work] = {}
        self._own = torch.zeros(0)
        self._sent: list[dist.Work] = []

    def begin(self, call: Mapping[str, object]) -> None:
        """Announce a call: its name, and everything else that must be the same on all ranks."""
        if (communicator := self._communicator) is None:
            return
        announcement = _announcement(call)
        tag = communicator.control_tag(ControlMessage.CALL)
        # receives first: a rank that gets an announcement can rely on its own being delivered
        for peer, received in self._received.items():
            self._pending[peer] = communicator.receive_host(received, peer, tag)
        # the announcement of the last call was received, because that call ended on all ranks
        self._own = announcement
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
        calls = {self._rank: _read(self._own), peer: _read(self._received[peer])}
        named = {rank if self._names is None else self._names[rank]: call for rank, call in calls.items()}
        heading, advice = self._texts
        return "\n".join([heading, *differences(dict(sorted(named.items()))), advice])

    def abandon(self) -> None:
        """Release everything that refers to the connections."""
        self._pending.clear()
        self._sent.clear()
        self._communicator = None


def _announcement(call: Mapping[str, object]) -> torch.Tensor:
    text = json.dumps(call).encode().ljust(_BYTES)
    assert len(text) == _BYTES, f"the peers receive {_BYTES} bytes, not the {len(text)} of {call}"
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _read(announcement: torch.Tensor) -> dict[str, tuple[object, object]]:
    return {topic: (value, value) for topic, value in json.loads(announcement.numpy().tobytes()).items()}
