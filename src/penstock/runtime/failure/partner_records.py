"""Why a wait for partners fails: each process records its pipelines, and answers questions of other ranks.

Partners are ranks of other pipelines that train the same stages. Questions and answers go through the watch,
and only after a failure:

    unmet      partners have not connected in time: does this rank have a pipeline that should have?
    broken     a connection to partners has ended: has this rank closed it?
    withdrawn  what was unmet is not expected any more
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from uuid import uuid4

from penstock.arguments import listed
from penstock.runtime.failure.links import Ended
from penstock.runtime.failure.watch import JobWatch

_ANSWER_SECONDS = 1.0
_KEPT_NAMES = 256
_WITHOUT = "created without replicas= or a wrapper for data parallelism"


class PipelineRecord:
    """One pipeline of this process, as long as it exists."""

    def __init__(self, stages: str) -> None:
        self.stages = stages
        """A digest of this rank's stages, the same for their replicas."""
        self.groups: Mapping[tuple[int, ...], bool] = {}
        """The world ranks of each group of partners, and whether these are replicas."""
        self.is_connected = False
        self.created_at = time.monotonic()


class _Unmet(NamedTuple):
    """A rank has waited in vain for a group that this rank is in."""

    rank: int
    group: tuple[int, ...]
    stages: str
    seconds: float
    are_replicas: bool
    received_at: float


class PartnerRecords:
    """The records of this process; a listener of its watch."""

    def __init__(self, watch: JobWatch) -> None:
        self._watch = weakref.ref(watch)
        self._rank = watch.rank
        self._pipelines: weakref.WeakSet[PipelineRecord] = weakref.WeakSet()
        self._closed: deque[str] = deque(maxlen=_KEPT_NAMES)
        self._noticed: dict[tuple[int, ...], int] = {}
        """By group of partners: the rank that asked after a connection that this rank had closed."""
        self._unmet: dict[tuple[int, str], _Unmet] = {}
        """By the rank that waited, and its stages."""
        self._published: set[str] = set()
        """The stages for whose partners this rank has waited in vain."""
        self._answers: dict[str, dict[int, str]] = {}
        self._changed = threading.Condition()
        watch.add_listener(self)

    # --- this rank's pipelines ---------------------------------------------------------------------

    def add(self, pipeline: PipelineRecord) -> None:
        """Record a pipeline, which may have been recorded before."""
        with self._changed:
            self._pipelines.add(pipeline)

    def closed(self, name: str) -> None:
        """This rank has closed the connection of this name to partners, and not after a failure."""
        self._closed.append(name)

    def connected(self, pipeline: PipelineRecord) -> None:
        """A pipeline has connected to its partners, if it has any: this rank expects no others any more."""
        pipeline.is_connected = True
        for group in pipeline.groups:
            self._noticed.pop(group, None)
        if pipeline.stages in self._published:
            self._published.discard(pipeline.stages)
            self._send({"type": "withdrawn", "rank": self._rank, "stages": pipeline.stages})

    # --- questions ---------------------------------------------------------------------------------

    def absent_partners(self, pipeline: PipelineRecord, group: Sequence[int], seconds: float) -> str:
        """Tell the ranks of a group that they have not connected in time; gives what they answer."""
        self._published.add(pipeline.stages)
        are_replicas = pipeline.groups[tuple(group)]
        about = {"stages": pipeline.stages, "seconds": seconds, "are_replicas": are_replicas}
        return "; ".join(self._ask({"type": "unmet", **about}, group).values())

    def closed_by(self, name: str, group: Sequence[int]) -> list[int]:
        """The world ranks of a group that have closed the connection of this name."""
        return sorted(self._ask({"type": "broken", "connection": name}, group))

    def noticed_close(self, group: tuple[int, ...]) -> str:
        """That this rank had closed its pipeline when a partner made its next call; empty if it had not."""
        rank = self._noticed.get(group)
        if rank is None:
            return ""
        return f"this rank has closed its pipeline, but world rank {rank} had not, and its next call failed"

    def _ask(self, question: dict[str, Any], group: Sequence[int]) -> dict[int, str]:
        """The answers by rank that are not empty, of those that come in time."""
        key, end = uuid4().hex, time.monotonic() + _ANSWER_SECONDS
        watch = self._watch()
        others = set(group) - {self._rank} - (set() if watch is None else set(watch.ended))
        with self._changed:
            answers = self._answers[key] = {}
        self._send({**question, "question": key, "rank": self._rank, "group": list(group)})
        with self._changed:
            self._changed.wait_for(lambda: others <= set(answers), end - time.monotonic())
            del self._answers[key]
        return {rank: text for rank, text in sorted(answers.items()) if text}

    def problem(self, pipeline: PipelineRecord) -> str:
        """Why this pipeline must not go on: another rank expects it among its partners; empty if none does."""
        if not self._unmet:
            return ""
        with self._changed:
            found = [each for each in self._unmet.values() if self._concerns(each, pipeline)]
        if not found:
            return ""
        first = found[0]
        ranks = listed(each.rank for each in found if each.stages == first.stages)
        role = "replicas" if first.are_replicas else "ranks with shards of its parameters"
        return (
            f"world rank {ranks} trains the same stages and expects this rank among its {role} (world ranks "
            f"{listed(first.group)}), but this pipeline was {_lacking(first)}. World rank {first.rank} has "
            f"waited {first.seconds:g} s for it: create the pipelines of all replicas with the same options, "
            "within that time"
        )

    def _concerns(self, unmet: _Unmet, pipeline: PipelineRecord) -> bool:
        """Whether a pipeline lacks the partners that another rank expects.

        One that is created later may not be meant, unless that rank has ended and cannot change its mind.
        """
        if any(self._is_paired(each, unmet) for each in self._pipelines):
            return False
        watch = self._watch()
        has_ended = watch is not None and unmet.rank in watch.ended
        return self._lacks(pipeline, unmet) and (has_ended or unmet.received_at > pipeline.created_at)

    def _is_paired(self, pipeline: PipelineRecord, unmet: _Unmet) -> bool:
        return pipeline.stages == unmet.stages and any(unmet.rank in group for group in pipeline.groups)

    def _lacks(self, pipeline: PipelineRecord, unmet: _Unmet) -> bool:
        return pipeline.stages == unmet.stages and unmet.are_replicas not in pipeline.groups.values()

    # --- events, on the thread of the watch --------------------------------------------------------

    def on_message(self, message: dict[str, Any]) -> None:
        """A question, an answer, or a rank that does not wait any more."""
        kind = message["type"]
        if kind == "answer":
            with self._changed:
                if (answers := self._answers.get(message["question"])) is not None:
                    answers[int(message["rank"])] = str(message["text"])
                    self._changed.notify_all()
        elif kind == "withdrawn":
            with self._changed:
                self._unmet.pop((message["rank"], message["stages"]), None)
        elif kind == "broken" and self._rank in message["group"]:
            is_closed = message["connection"] in self._closed
            if is_closed:
                self._noticed[tuple(message["group"])] = message["rank"]
            self._answer(message, "closed" if is_closed else "")
        elif kind == "unmet" and self._rank in message["group"]:
            self._answer(message, self._noted(message))

    def on_end(self, ended: Ended) -> None:
        """The end of a process is known to the watch."""

    def on_beat(self) -> None:
        """Nothing depends on time."""

    def _noted(self, message: dict[str, Any]) -> str:
        """Remember what another rank waited for; gives the reason on this rank, if there is one."""
        rank, group, stages = message["rank"], tuple(message["group"]), message["stages"]
        seconds, are_replicas = message["seconds"], message["are_replicas"]
        unmet = _Unmet(rank, group, stages, seconds, are_replicas, time.monotonic())
        with self._changed:
            self._unmet[unmet.rank, unmet.stages] = unmet
            pipelines = list(self._pipelines)
        if any(each.is_connected for each in pipelines if self._is_paired(each, unmet)):
            why = "has not closed its pipeline: call close() on all replicas or on none"
        elif any(self._concerns(unmet, each) for each in pipelines):
            why = f"trains the same stages in a pipeline that was {_lacking(unmet)}"
        else:
            return ""
        return f"world rank {self._rank} {why}"

    def _answer(self, question: dict[str, Any], text: str) -> None:
        """Answer over the link to the rank that asks; if there is none, tell it only what it can use."""
        watch = self._watch()
        if watch is not None:
            answer = {"type": "answer", "question": question["question"], "rank": self._rank, "text": text}
            if question["rank"] in watch.linked():
                watch.send(answer, [question["rank"]])
            elif text:
                watch.send(answer)

    def _send(self, message: dict[str, Any]) -> None:
        if (watch := self._watch()) is not None:
            watch.send(message)


def _lacking(unmet: _Unmet) -> str:
    return _WITHOUT if unmet.are_replicas else "created with parameters that are not distributed"


_records: weakref.WeakKeyDictionary[JobWatch, PartnerRecords] = weakref.WeakKeyDictionary()


def partner_records(watch: JobWatch) -> PartnerRecords:
    """The records of the process with this watch."""
    if watch not in _records:
        _records[watch] = PartnerRecords(watch)
    return _records[watch]
