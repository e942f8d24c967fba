"""The failure monitor of one connection: the first failure on any rank becomes the failure on all ranks.

Ranks send each other failures through the failure detector, never over the channels, which may be what failed.
A rank that learns of a failure sends its status to the ranks of its pipeline, stops before its next action, and
ends its connections, so that no wait continues. If two ranks fail at once, every rank receives both causes
before any status, and picks the same one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from penstock.arguments import some
from penstock.errors import FailureKind
from penstock.runtime.failure.detector import SILENT_SECONDS, FailureDetector
from penstock.runtime.failure.links import Ended, FailureCause, Listener, RankStatus
from penstock.runtime.states.writer import request_states
from penstock.runtime.transport.transport_errors import TransportError
from penstock.traces.diagnose.rank_state import Wait

_GRACE_SECONDS = 3.0  # how long a rank with a broken connection waits for another rank's cause
_MISSED_SECONDS = 20.0  # how long ago a failure of another pipeline can be that broke a connection of this one
_STATUS_SECONDS = 1.0  # how long ranks have to send what they were doing
_STUCK_SECONDS = 1.5  # how long a rank may take to notice the failure before all its groups are aborted


_PRECEDENCE = {
    FailureKind.EXCEPTION: (1, 1),
    FailureKind.INTERRUPTED: (1, 1),
    FailureKind.TIMEOUT: (3, 2),
    FailureKind.LOST: (4, 0),
}
"""Without and with a process: an ended process explains exceptions, and both explain timeouts."""


class FailureMonitor(Listener):
    """The monitor of one connection on one rank; `name` is that of the connection on all its ranks.

    `status` gives what this rank is doing; `on_failure` is called once, `on_stuck` if the rank does not react.
    """

    def __init__(
        self,
        detector: FailureDetector,
        name: str,
        members: Sequence[int],
        timeout: float,
        status: Callable[[], RankStatus],
        on_failure: Callable[[], None],
        on_stuck: Callable[[], None],
    ) -> None:
        self.detector, self.members = detector, tuple(members)
        self._name, self._timeout = name, timeout
        self.rank = self.members.index(detector.rank)
        """The rank in the pipeline."""
        self._status, self._on_failure, self._on_stuck = status, on_failure, on_stuck
        self.replica_peers: Sequence[int] = ()
        """World ranks of other pipelines that train the same stages."""
        self._causes: list[FailureCause] = []
        self._statuses: dict[int, RankStatus] = {}
        self._changed = threading.Condition(threading.RLock())
        self._stuck_at = float("inf")
        self._created_at = time.monotonic()
        detector.add_listener(self)

    # --- the failing rank --------------------------------------------------------------------------

    @property
    def cause(self) -> FailureCause | None:
        """The known cause that comes before all others."""
        with self._changed:
            return min(self._causes, key=self._precedence, default=None)

    def begin(self) -> None:
        """A step begins: it fails at once if the process of a rank has ended."""
        self.detector.active = self
        for rank in self.members:
            if (ended := self.detector.ended.get(rank)) is not None:
                self._fail(self._end_cause(ended), self.members)
                return

    def raise_if_failed(self) -> None:
        """Raise if a failure is known, after which no message arrives."""
        if self._causes:
            raise TransportError("the connection is closed")

    def handled(self) -> None:
        """This rank has noticed the failure."""
        self._stuck_at = float("inf")

    def wait_for_cause(self, seconds: float = _GRACE_SECONDS) -> FailureCause | None:
        """Return the cause, if one becomes known within this time."""
        with self._changed:
            self._changed.wait_for(lambda: self._causes, seconds)
        return self.cause

    def missed_cause(self) -> FailureCause | None:
        """The failure of another pipeline in the same step, received before this rank began it.

        One from before this connection was reported by the connection before.
        """
        received_at, message = self.detector.last_cause
        if received_at < max(self._created_at, time.monotonic() - _MISSED_SECONDS):
            return None
        if self._status().call_number != message["cause"]["call_number"]:
            return None
        cause = _cause_in(message)
        if self.detector.rank not in cause.members:
            self._add(cause)
        return self.cause

    def publish_cause(self, cause: FailureCause) -> FailureCause:
        """Send the cause to all ranks of the job, unless another is known; return the one that is."""
        world_rank = self.members[cause.rank] if cause.world_rank < 0 else cause.world_rank
        own = self.detector.rank
        self._fail(replace(cause, members=self.members, world_rank=world_rank, reporter=own), None)
        found = self.cause
        assert found is not None, "there is one now"
        return found

    def settled(self) -> tuple[FailureCause | None, dict[int, RankStatus]]:
        """The cause, and what the ranks of the pipeline were doing: those that answer in time."""
        end = time.monotonic() + _STATUS_SECONDS
        with self._changed:
            while any(map(self._may_answer, range(len(self.members)))) and time.monotonic() < end:
                self._changed.wait(0.1)
            return self.cause, dict(self._statuses)

    def _may_answer(self, rank: int) -> bool:
        member = self.members[rank]
        is_lost = member in self.detector.ended or self.detector.silence(member) > SILENT_SECONDS
        return rank not in self._statuses and not is_lost

    def ended(self) -> dict[int, Ended]:
        """The ranks of the pipeline whose process has ended or cannot be reached."""
        found = {rank: self.detector.ended.get(member) for rank, member in enumerate(self.members)}
        return {rank: ended for rank, ended in found.items() if ended is not None}

    def lost_rank(self) -> FailureCause | None:
        """The known cause, or a rank that ended or is silent, after a message has failed."""
        if (cause := self.wait_for_cause()) is not None:
            return cause
        unknown = FailureCause(self.rank, FailureKind.LOST, 0, "")
        return None if (blamed := self.blamed(unknown)) is unknown else blamed

    def blamed(self, cause: FailureCause) -> FailureCause:
        """The cause of a broken connection or a timeout: a rank that ended or is silent, if there is one.

        A rank of this pipeline comes first, then its replica peers, also if they exited by themselves. Any
        other rank may block one of this pipeline in a collective.
        """
        others = sorted(set(self.detector.processes) - {*self.members, *self.replica_peers})
        for ranks in (self.members, self.replica_peers, others):
            for rank in ranks:
                ended = self.detector.ended.get(rank)
                if ended is not None and (ranks is not others or not ended.reason):
                    return self._end_cause(ended)
            silences = {rank: self.detector.silence(rank) for rank in ranks}
            silent, seconds = max(silences.items(), key=lambda each: each[1], default=(-1, 0.0))
            if seconds >= SILENT_SECONDS:
                return self._silence_cause(silent, cause.message)
        return cause

    def stop(self) -> None:
        """Receive no more failures."""
        self.detector.remove_listener(self)
        if self.detector.active is self:
            self.detector.active = None

    # --- events, on the thread of the failure detector --------------------------------------------------------

    def on_message(self, message: dict[str, Any]) -> None:
        """A cause or a status from another rank, or its request for the states of all ranks."""
        own = message.get("connection") == self._name
        if message["type"] == "state":
            request_states(f"signal on world rank {message['rank']}")
        elif message["type"] == "status" and own:
            with self._changed:
                self._statuses[int(message["rank"])] = _status_in(message["status"])
                self._changed.notify_all()
        elif message["type"] == "cause":
            cause = _cause_in(message)
            other_pipeline = self.detector.active is self and self.detector.rank not in cause.members
            if own or other_pipeline:
                self._add(cause)

    def on_end(self, ended: Ended) -> None:
        """A process has ended; one that has exited by itself may have finished its work."""
        if not ended.reason and (ended.rank in self.members or self.detector.active is self):
            self._fail(self._end_cause(ended), self.members)

    def on_beat(self) -> None:
        """Fail a step for which a rank has not answered for too long; abort what blocks after a failure."""
        if self._status().mode == "outside":
            return
        if time.monotonic() > self._stuck_at:
            self.handled()
            self._on_stuck()
        silent = [rank for rank in self.detector.linked() if self.detector.silence(rank) > self._timeout]
        if silent and not self._causes:
            self._fail(self._silence_cause(min(silent), ""), None)

    # --- causes ------------------------------------------------------------------------------------

    def _precedence(self, cause: FailureCause) -> tuple[int, bool, int]:
        return _PRECEDENCE[cause.kind][bool(cause.process)], cause.members != self.members, cause.reporter

    def _cause_of(self, world_rank: int, kind: FailureKind, process: str, message: str) -> FailureCause:
        rank = self.members.index(world_rank) if world_rank in self.members else -1
        status = self._status()
        return FailureCause(
            rank,
            kind,
            status.call_number,
            message,
            process=process,
            members=self.members,
            world_rank=world_rank,
            reporter=self.detector.rank,
            call_name=status.call_name,
        )

    def _end_cause(self, ended: Ended) -> FailureCause:
        kind = FailureKind.TIMEOUT if ended.network_error else FailureKind.LOST
        return self._cause_of(ended.rank, kind, ended.process, str(ended))

    def _silence_cause(self, world_rank: int, message: str) -> FailureCause:
        process = self.detector.processes.get(world_rank, "unknown")
        silence = self.detector.describe_silence(world_rank)
        text = f"{silence}: it is stopped, or its host or the network fails"
        ranks = sorted(set(self.detector.processes) - {world_rank})
        if others := [rank for rank in ranks if self.detector.silence(rank) >= SILENT_SECONDS]:
            text += f"; no heartbeat from world rank {some(others)} either"
        return self._cause_of(
            world_rank, FailureKind.TIMEOUT, process, f"{text}; {message}" if message else text
        )

    def _fail(self, cause: FailureCause, ranks: Sequence[int] | None) -> None:
        """Send this cause to these ranks, by default to all of the job, unless one is known."""
        with self._changed:
            if self._causes:
                return
            self.detector.send({"type": "cause", "connection": self._name, "cause": asdict(cause)}, ranks)
            self._add(cause)

    def _add(self, cause: FailureCause) -> None:
        with self._changed:
            self._causes.append(cause)
            if len(self._causes) > 1:
                return
            status = self._status()
            self._statuses[self.rank] = status
            message = {"connection": self._name, "rank": self.rank, "status": asdict(status)}
            self.detector.send({"type": "status", **message}, self.members)
            self.detector.failed_at = time.monotonic()
            self._stuck_at = self.detector.failed_at + _STUCK_SECONDS
            self._changed.notify_all()
        self._on_failure()


def _cause_in(message: dict[str, Any]) -> FailureCause:
    keys = message["cause"]
    return FailureCause(**keys | {"kind": FailureKind(keys["kind"]), "members": tuple(keys["members"])})


def _status_in(keys: dict[str, Any]) -> RankStatus:
    return RankStatus(**keys | {"awaited": Wait.load(keys["awaited"])})
