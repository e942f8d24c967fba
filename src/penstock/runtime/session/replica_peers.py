"""Replica peers: ranks of other pipelines that share collectives with this rank, and make the same calls.

Replica peers are replicas, ranks with other shards of the same parameters, and tensor-parallel ranks. Those of
one process group tell each other their calls before the first collective of a call: collectives of different
calls would be mixed up, or gloo would end the process.

A pipeline without `replicas=` has no connection to a rank that waits for it as a replica. So each process
records its pipelines and answers questions of other ranks, through the failure detector, after a failure:

    unmet      replica peers have not connected in time: does this rank have a pipeline that should have?
    broken     a connection to replica peers has ended: has this rank closed it?
    withdrawn  what was unmet is not expected any more
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple
from uuid import uuid4

import torch
import torch.distributed as dist

from penstock.arguments import listed
from penstock.errors import PipelineError
from penstock.ir.kinds import Kind
from penstock.runtime.config import ExecutionConfig
from penstock.runtime.data_parallel.gradient_norm import model_groups
from penstock.runtime.failure.detector import FailureDetector
from penstock.runtime.failure.links import Listener
from penstock.runtime.failure.monitor import FailureMonitor
from penstock.runtime.failure.process_detector import connecting, detector_of_others, raise_if_ended
from penstock.runtime.session.agreement import (
    announced_call,
    announcement,
    differences,
    digest,
    schedule_digest,
)
from penstock.runtime.transport.communicator import Communicator
from penstock.runtime.transport.transport_errors import TransportError
from penstock.traces.diagnose.rank_state import Wait, WaitKind

_ANSWER_SECONDS = 3.0
_KEPT_NAMES = 256


class PipelineRecord:
    """One pipeline of this process, as long as it exists, and the replica peers that it has or should have.

    `stages` is a digest of this rank's stages, the same for their replicas; `seconds` is the timeout.
    """

    def __init__(self, stages: str, seconds: float) -> None:
        self.stages, self.seconds = stages, seconds
        self.groups: Mapping[tuple[int, ...], bool] = {}
        """The world ranks of each group of replica peers, and whether these compute on different data."""
        self.is_connected = False
        self.created_at = time.monotonic()
        self.records = PeerRecords(None)

    @staticmethod
    def of(config: ExecutionConfig) -> PipelineRecord:
        """Return the record for a config; stages are the same if the shapes of their parameters are."""
        shapes = {
            stage: [tuple(each.shape) for each in module.parameters()]
            for stage, module in config.trained.items()
        }
        stages = digest(f"{config.schedule.num_stages} {sorted(shapes.items())}")
        return PipelineRecord(stages, config.timeout.total_seconds())

    def begin(self, config: ExecutionConfig, groups: Sequence[tuple[int, ...]]) -> None:
        """Record that the pipeline connects, with these groups of replica peers."""
        replicas = {rank for group in config.replication.groups for rank in dist.get_process_group_ranks(group)}
        self.groups = {group: replicas.issuperset(group) for group in groups}
        self.records = peer_records(detector_of_others(config.timeout))
        self.records.add(self)

    def reason(self, group: tuple[int, ...], lost: str) -> str:
        """Return why a group has not connected; `lost` says which of its ranks have ended, if any.

        If none has, they are told that this rank has waited for them.
        """
        if not lost:
            return self.records.absent_peers(self, group)
        return "; ".join(filter(None, (lost, self.records.noticed_close(group))))


class _Unmet(NamedTuple):
    """A rank has waited until its timeout for a group that this rank is in."""

    rank: int
    group: tuple[int, ...]
    stages: str
    seconds: float
    are_replicas: bool
    received_at: float

    def is_answered_by(self, pipeline: PipelineRecord) -> bool:
        return pipeline.stages == self.stages and any(self.rank in group for group in pipeline.groups)

    @property
    def lacking(self) -> str:
        if self.are_replicas:
            return "created without replicas= or a wrapper for data parallelism"
        return "created with parameters that are not distributed"


class PeerRecords(Listener):
    """The records of this process; a listener of its failure detector, if it has one."""

    def __init__(self, detector: FailureDetector | None) -> None:
        self._detector = detector
        self._rank = -1 if detector is None else detector.rank
        self._pipelines: weakref.WeakSet[PipelineRecord] = weakref.WeakSet()
        self._closed: deque[str] = deque(maxlen=_KEPT_NAMES)
        self._noticed: dict[tuple[int, ...], int] = {}
        """By group of replica peers: the rank that asked after a connection that this rank had closed."""
        self._unmet: dict[tuple[int, str], _Unmet] = {}
        """By the rank that waited, and its stages."""
        self._published: set[str] = set()
        """The stages for whose replica peers this rank has waited until the timeout."""
        self._answers: dict[str, dict[int, str]] = {}
        self._changed = threading.Condition()
        if detector is not None:
            detector.add_listener(self)

    def add(self, pipeline: PipelineRecord) -> None:
        """Record a pipeline, which may have been recorded before."""
        with self._changed:
            self._pipelines.add(pipeline)

    def closed(self, name: str) -> None:
        """Record that this rank has closed the connection of this name, and not after a failure."""
        self._closed.append(name)

    def connected(self, pipeline: PipelineRecord) -> None:
        """Record that a pipeline has connected: this rank expects no other replica peers any more."""
        pipeline.is_connected = True
        for group in pipeline.groups:
            self._noticed.pop(group, None)
        if pipeline.stages in self._published:
            self._published.discard(pipeline.stages)
            self._send({"type": "withdrawn", "rank": self._rank, "stages": pipeline.stages})

    # --- questions ---------------------------------------------------------------------------------

    def absent_peers(self, pipeline: PipelineRecord, group: tuple[int, ...]) -> str:
        """Tell the ranks of a group that they have not connected in time; return what they answer."""
        self._published.add(pipeline.stages)
        about = {"stages": pipeline.stages, "seconds": pipeline.seconds, "are_replicas": pipeline.groups[group]}
        return "; ".join(self._ask({"type": "unmet", **about}, group).values())

    def closed_by(self, name: str, group: Sequence[int]) -> list[int]:
        """Return the world ranks of a group that have closed the connection of this name."""
        return sorted(self._ask({"type": "broken", "connection": name}, group))

    def noticed_close(self, group: tuple[int, ...]) -> str:
        """Return that this rank had closed its pipeline when a replica peer called it; empty if it had not."""
        rank = self._noticed.get(group)
        if rank is None:
            return ""
        return f"this rank has closed its pipeline, but world rank {rank} had not, and its next call failed"

    def _ask(self, question: dict[str, Any], group: Sequence[int]) -> dict[int, str]:
        """Return the answers by rank that are not empty, of those that come in time."""
        if self._detector is None:
            return {}
        key, end = uuid4().hex, time.monotonic() + _ANSWER_SECONDS
        others = set(group) - {self._rank} - set(self._detector.ended)
        with self._changed:
            answers = self._answers[key] = {}
        self._send({**question, "question": key, "rank": self._rank, "group": list(group)})
        with self._changed:
            self._changed.wait_for(lambda: others <= set(answers), end - time.monotonic())
            del self._answers[key]
        return {rank: text for rank, text in sorted(answers.items()) if text}

    def problem(self, pipeline: PipelineRecord) -> str:
        """Return why this pipeline must not go on: another rank expects it; empty if none does."""
        with self._changed:
            found = [each for each in self._unmet.values() if self._concerns(each, pipeline)]
        if not found:
            return ""
        first = found[0]
        ranks = listed(each.rank for each in found if each.stages == first.stages)
        role = "replicas" if first.are_replicas else "ranks with shards of its parameters"
        return (
            f"world rank {ranks} trains the same stages and expects this rank among its {role} (world ranks "
            f"{listed(first.group)}), but this pipeline was {first.lacking}. World rank {first.rank} has "
            f"waited {first.seconds:g} s for it: create the pipelines of all replicas with the same options, "
            "within that time"
        )

    def _concerns(self, unmet: _Unmet, pipeline: PipelineRecord) -> bool:
        """Return whether a pipeline lacks the replica peers that another rank expects.

        One that is created later may not be meant, unless that rank has ended and cannot change its mind.
        """
        if any(map(unmet.is_answered_by, self._pipelines)) or pipeline.stages != unmet.stages:
            return False
        has_ended = self._detector is not None and unmet.rank in self._detector.ended
        is_meant = has_ended or unmet.received_at > pipeline.created_at
        return is_meant and unmet.are_replicas not in pipeline.groups.values()

    # --- events, on the thread of the failure detector -----------------------------------------------

    def on_message(self, message: dict[str, Any]) -> None:
        """Handle a question, an answer, or a rank that does not wait any more."""
        kind = message["type"]
        if kind == "answer":
            with self._changed:
                if (answers := self._answers.get(message["question"])) is not None:
                    answers[message["rank"]] = message["text"]
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
            self._answer(message, self._note_unmet(message))

    def _note_unmet(self, message: dict[str, Any]) -> str:
        """Remember what another rank waited for; return the reason on this rank, if there is one."""
        unmet = _Unmet(
            message["rank"],
            tuple(message["group"]),
            message["stages"],
            message["seconds"],
            message["are_replicas"],
            received_at=time.monotonic(),
        )
        with self._changed:
            self._unmet[unmet.rank, unmet.stages] = unmet
            pipelines = list(self._pipelines)
        if any(each.is_connected for each in pipelines if unmet.is_answered_by(each)):
            why = "has not closed its pipeline: call close() on all replicas or on none"
        elif any(self._concerns(unmet, each) for each in pipelines):
            why = f"trains the same stages in a pipeline that was {unmet.lacking}"
        else:
            return ""
        return f"world rank {self._rank} {why}"

    def _answer(self, question: dict[str, Any], text: str) -> None:
        """Answer over the link to the rank that asks; if there is none, tell it only what it can use."""
        answer = {"type": "answer", "question": question["question"], "rank": self._rank, "text": text}
        if self._detector is not None and question["rank"] in self._detector.linked():
            self._detector.send(answer, [question["rank"]])
        elif text:
            self._send(answer)

    def _send(self, message: dict[str, Any]) -> None:
        if self._detector is not None:
            self._detector.send(message)


def peer_records(detector: FailureDetector | None) -> PeerRecords:
    """Return the records of the process with this detector, which keeps them."""
    if detector is None:
        return PeerRecords(None)
    if not isinstance(detector.kept, PeerRecords):
        detector.kept = PeerRecords(detector)
    return detector.kept


# --- calls -------------------------------------------------------------------------------------------

_HEADING = "world ranks of several pipelines that train the same stages differ:"
_ADVICE = (
    "Every pipeline must make the same calls in the same order, and replicas must be trained alike: look for "
    "a call or an option of the optimizer that depends on the rank, a data loader with fewer batches on one "
    "rank, or an exception that one rank caught"
)
_BYTES = 512
_CAUSE_SECONDS = 0.25  # how long the failure that broke a connection may take to be known here
_LONGEST_NAME = 100


def peer_groups_of(config: ExecutionConfig) -> list[tuple[int, ...]]:
    """Return the world ranks of each process group that this rank shares with other pipelines.

    All ranks have their groups in one order, so no two ranks wait for each other in different groups.
    """
    pipeline = set(config.members)
    groups = model_groups(config.trained.values(), config.replication.groups)
    members = {tuple(dist.get_process_group_ranks(group)) for group in groups}
    return sorted(ranks for ranks in members if len(ranks) > 1 and len(pipeline.intersection(ranks)) == 1)


class ReplicaPeers:
    """The connections of one rank to its replica peers; all of them connect at the same time."""

    def __init__(self, config: ExecutionConfig, options: Mapping[str, object], record: PipelineRecord) -> None:
        """Compare `options` with those of the replica peers, once."""
        self._config, self._record = config, record
        self._groups: dict[tuple[int, ...], Communicator] = {}
        """By world ranks."""
        self._unbroken: list[str] = []
        """The names of the connections that no failure has ended."""
        communicators: list[Communicator] = []
        self._close = weakref.finalize(self, _close, communicators, self._unbroken, record.records)
        self._have_same_data = not all(record.groups.values())
        """Whether some replica peers compute on the same data as this rank, in collectives of every forward."""
        own = config.members[config.rank]
        for members, are_replicas in record.groups.items():
            facts = {**options, **_collectives(config, same_data=not are_replicas)}
            with connecting(config, members, partial(record.reason, members)):
                communicator = Communicator(
                    *(members, members.index(own), (), 1, torch.device("cpu"), config.timeout),
                    check=partial(raise_if_ended, members),
                )
                communicators.append(communicator)
                texts = communicator.exchange_texts(json.dumps(facts))
            if found := differences({member: json.loads(text) for member, text in zip(members, texts)}):
                raise PipelineError("\n".join([_HEADING, *found.values()]))
            self._groups[members] = communicator
        self._unbroken.extend(communicator.name for communicator in communicators)
        self.ranks = sorted({rank for members in self._groups for rank in members} - {own})
        """The world ranks of all replica peers."""

    @property
    def awaited(self) -> Wait:
        """What a rank waits for that compares its call."""
        others = f"world rank {listed(self.ranks)}, which trains the same stages in another pipeline"
        return Wait(WaitKind.CALL, f"the call of {others}")

    def has_collectives_in_eval(self, *, with_loss: bool) -> bool:
        """Return whether an eval needs the replica peers: to gather shards, or to add up losses."""
        config = self._config
        has_loss = with_loss and any(sink in config.modules for sink in config.losses)
        return self._have_same_data or bool(config.replication.shards) or has_loss

    def compare(self, call: Mapping[str, object], step: int | None = None) -> None:
        """Raise unless all replica peers make this call; in a step, also if their parameters differ.

        A step with this number compares the layout of all parameters, and the values of one that replicas hold.
        """
        config = self._config
        layout = {} if step is None else {"parameters": _layout(config)}
        sample = None if step is None else config.replication.sample(step)
        for members, communicator in self._groups.items():
            values = {}
            if sample is not None and sample[0] == members:
                values["values of a parameter"] = f"{_shortened(sample[1])}: {sample[2]}"
            own = announcement({**call, **layout, **values}, _BYTES)
            if not communicator.all_equal(own):
                announced = communicator.all_gather(own)
                with suppress(TransportError):
                    communicator.barrier()  # the first to raise ends the connections, when all have these
                calls = {member: announced_call(each) for member, each in zip(members, announced)}
                raise PipelineError("\n".join([_HEADING, *differences(calls).values(), _ADVICE]))

    def closed_peers(self, monitor: FailureMonitor | None) -> list[int]:
        """Return the replica peers that closed their connection, after one broke that no failure explains."""
        if monitor is not None and monitor.wait_for_cause(_CAUSE_SECONDS) is not None:
            return []
        ask = self._record.records.closed_by
        return sorted({rank for members, each in self._groups.items() for rank in ask(each.name, members)})

    def abort(self) -> None:
        """End all waits for replica peers, here and there; any thread may call it."""
        self._unbroken.clear()
        for communicator in list(self._groups.values()):
            communicator.abort()

    def close(self) -> None:
        """Close all connections."""
        self._groups.clear()
        self._close()


def _close(communicators: Sequence[Communicator], unbroken: Sequence[str], records: PeerRecords) -> None:
    for name in unbroken:
        records.closed(name)
    for communicator in communicators:
        communicator.close()


def _collectives(config: ExecutionConfig, *, same_data: bool) -> dict[str, str]:
    """Return the order of collectives: of all actions if replica peers have the same data, as with DTensors."""
    schedule = config.schedule
    if same_data:
        return {"schedule": f"{schedule.name} ({schedule_digest(schedule)})"}
    kinds = (Kind.UNSHARD, Kind.REDUCE_GRAD) if config.replication.shards else (Kind.REDUCE_GRAD,)
    own = [str(action) for action in schedule.ranks[config.rank] if action.kind in kinds]
    order = " ".join(own)
    return {f"order of {' and '.join(map(str, kinds))}": order if len(own) <= 8 else digest(order)}


def _layout(config: ExecutionConfig) -> str:
    """Return what collectives depend on: shapes and types of parameters, and which are trained."""
    parameters = [each for _, module in sorted(config.trained.items()) for each in module.parameters()]
    text = " ".join(f"{tuple(each.shape)} {each.dtype} {each.requires_grad}" for each in parameters)
    trained = sum(each.requires_grad for each in parameters)
    return f"{trained} of {len(parameters)} are trained (digest of shapes {digest(text)})"


def _shortened(name: str) -> str:
    """Return the end of a name that fits into an announcement, where a character may take up to 12 bytes."""
    while len(json.dumps(name)) > _LONGEST_NAME:
        name = name[1:]
    return name
