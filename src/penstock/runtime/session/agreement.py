"""What ranks compare: when they connect, and at each call, within a pipeline and with replicas."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from penstock.arguments import listed
from penstock.errors import PipelineError
from penstock.ir.kinds import Kind
from penstock.runtime.config import ExecutionConfig
from penstock.runtime.data_parallel.gradient_norm import model_groups
from penstock.runtime.failure.agreement import differences, digest, facts_in, schedule_digest
from penstock.runtime.failure.job import watch_of_others
from penstock.runtime.failure.lost_ranks import connecting, raise_if_ended
from penstock.runtime.failure.monitor import FailureMonitor
from penstock.runtime.failure.partner_records import PartnerRecords, PipelineRecord, partner_records
from penstock.runtime.transport.communicator import Communicator, ControlMessage
from penstock.runtime.transport.transport_errors import Pending, TransportError, wait
from penstock.traces.rank_state import Wait, WaitKind

# Which partners a pipeline has and which other ranks expect it to have: nobody trains alone by mistake.
#
# A pipeline without `replicas=` has no connection to a rank that waits for it as a replica. So each pipeline
# of a job with several ranks is recorded, and a rank that has waited in vain tells it.


class ExpectedPartners:
    """The partners of one pipeline on this rank, over all its connections."""

    def __init__(self, config: ExecutionConfig) -> None:
        self._seconds = config.timeout.total_seconds()
        self._pipeline = PipelineRecord(_stages(config))
        self._records: PartnerRecords | None = None

    def begin(self, config: ExecutionConfig, groups: Sequence[tuple[int, ...]]) -> None:
        """The pipeline connects, with these groups of partners."""
        watch = watch_of_others(config.timeout)
        self._records = None if watch is None else partner_records(watch)
        replicas = {rank for group in config.replication.groups for rank in dist.get_process_group_ranks(group)}
        self._pipeline.groups = {group: replicas.issuperset(group) for group in groups}
        if self._records is not None:
            self._records.add(self._pipeline)

    def are_replicas(self, group: tuple[int, ...]) -> bool:
        """Whether the ranks of a group compute on different data."""
        return self._pipeline.groups[group]

    def connected(self) -> None:
        """The pipeline is connected."""
        if self._records is not None:
            self._records.connected(self._pipeline)

    def disconnected(self) -> None:
        """The pipeline is closed, or its connections have failed."""
        self._pipeline.is_connected = False

    def closed(self, name: str) -> None:
        """This rank has closed the connection of this name, and not after a failure."""
        if self._records is not None:
            self._records.closed(name)

    def reason(self, group: tuple[int, ...], lost: str) -> str:
        """Why the partners of a group have not connected; `lost` says which of them have ended, if any.

        If none has, they are told that this rank has waited for them.
        """
        if self._records is None:
            return lost
        if not lost:
            return self._records.absent_partners(self._pipeline, group, self._seconds)
        return "; ".join(filter(None, (lost, self._records.noticed_close(group))))

    def closed_by(self, name: str, group: tuple[int, ...]) -> list[int]:
        """The partners that have closed the connection of this name."""
        return [] if self._records is None else self._records.closed_by(name, group)

    def raise_if_unpaired(self) -> None:
        """Raise if another rank expects this pipeline among its partners."""
        if self._records is not None and (problem := self._records.problem(self._pipeline)):
            raise PipelineError(problem)


def _stages(config: ExecutionConfig) -> str:
    """A digest of the numbers of this rank's stages and the shapes of their parameters, sharded or not."""
    shapes = {
        stage: [tuple(each.shape) for each in module.parameters()] for stage, module in config.trained.items()
    }
    return digest(f"{config.schedule.num_stages} {sorted(shapes.items())}")


# Compares the calls of the ranks: each announces its call to its peers, and checks theirs before it waits.
#
# The announcement is sent when a call begins, so it has arrived before the first message of that call is
# needed.


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
        found = differences({rank: calls[rank] for rank in sorted(calls)})
        return "\n".join(["the ranks of the pipeline do not make the same call:", *found.values(), _ADVICE])

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


# Compares the calls of a rank with those of its partners: ranks of other pipelines in the same collectives.
#
# Partners are replicas, ranks with other shards of the same parameters, and tensor-parallel ranks. Those of one
# process group tell each other their calls before the first collective of a call. Collectives of different
# calls would be mixed up, or gloo would end the process.


_HEADING = "world ranks of several pipelines that train the same stages differ:"
_REPLICA_ADVICE = (
    "Every pipeline must make the same calls in the same order, and replicas must be trained alike: look for "
    "a call or an option of the optimizer that depends on the rank, a data loader with fewer batches on one "
    "rank, or an exception that one rank caught"
)
_REPLICA_BYTES = 512
_CAUSE_SECONDS = 0.25  # how long the failure may take to be known here that broke a connection
_LONGEST_NAME = 100


def partners_of(config: ExecutionConfig) -> list[tuple[int, ...]]:
    """The world ranks of each process group that this rank shares with other pipelines.

    All ranks have their groups in one order, so no two ranks wait for each other in different groups.
    """
    pipeline = set(config.members)
    groups = model_groups(config.trained.values(), config.replication.groups)
    members = {tuple(dist.get_process_group_ranks(group)) for group in groups}
    return sorted(ranks for ranks in members if len(ranks) > 1 and len(pipeline.intersection(ranks)) == 1)


class _Partners(NamedTuple):
    members: tuple[int, ...]
    """World ranks."""
    communicator: Communicator


class PartnerCalls:
    """One rank's part; all partners connect at the same time."""

    def __init__(
        self,
        config: ExecutionConfig,
        groups: Sequence[tuple[int, ...]],
        options: Mapping[str, object],
        expected: ExpectedPartners,
    ) -> None:
        """`groups` are those of `partners_of`; `options` are compared with those of the partners once."""
        self._config, self._expected = config, expected
        self._groups: list[_Partners] = []
        self._unbroken: list[str] = []
        """The names of the connections that no failure has ended."""
        self._close = weakref.finalize(
            self, _close, communicators := list[Communicator](), self._unbroken, expected
        )
        self._have_same_data = False
        """Whether some partners compute on the same data as this rank, in collectives of every forward."""
        for members in groups:
            same_data = not expected.are_replicas(members)
            self._have_same_data |= same_data
            facts = {**options, **_collectives(config, same_data=same_data)}
            rank = members.index(config.members[config.rank])
            with connecting(config, members, partial(expected.reason, members)):
                communicator = Communicator(
                    *(members, rank, (), 1, torch.device("cpu"), config.timeout),
                    check=partial(raise_if_ended, members),
                )
                communicators.append(communicator)
                texts = communicator.exchange_texts("facts", json.dumps(facts))
            if found := differences({member: facts_in(text) for member, text in zip(members, texts)}):
                raise PipelineError("\n".join([_HEADING, *found.values()]))
            self._groups.append(_Partners(members, communicator))
        self._unbroken.extend(group.communicator.name for group in self._groups)
        own = config.members[config.rank]
        self.ranks = sorted({rank for group in self._groups for rank in group.members} - {own})
        """The world ranks of all partners."""

    @property
    def awaited(self) -> Wait:
        """What a rank waits for that compares its call."""
        others = f"world rank {listed(self.ranks)}, which trains the same stages in another pipeline"
        return Wait(WaitKind.CALL, f"the call of {others}")

    def has_collectives_in_eval(self, *, with_loss: bool) -> bool:
        """Whether an eval on this rank needs its partners: to gather shards, or to add up losses."""
        config = self._config
        has_loss = with_loss and any(sink in config.modules for sink in config.losses)
        return self._have_same_data or bool(config.replication.shards) or has_loss

    def compare(self, call: Mapping[str, object], step: int | None = None) -> None:
        """Raise unless all partners make this call; in a step, also if their parameters differ.

        A step with this number compares the layout of all parameters, and the values of one that replicas hold.
        """
        config = self._config
        layout = {} if step is None else {"parameters": _layout(config)}
        sample = None if step is None else config.replication.sample(step)
        for members, communicator in self._groups:
            values = {}
            if sample is not None and sample[0] == members:
                values["values of a parameter"] = f"{_shortened(sample[1])}: {sample[2]}"
            own = announcement({**call, **layout, **values}, _REPLICA_BYTES)
            if not communicator.all_equal(own):
                announced = communicator.all_gather(own)
                with suppress(TransportError):
                    communicator.barrier()  # the first to raise ends the connections, when all have these
                calls = {member: announced_facts(each) for member, each in zip(members, announced)}
                raise PipelineError("\n".join([_HEADING, *differences(calls).values(), _REPLICA_ADVICE]))

    def closed_partners(self, monitor: FailureMonitor | None) -> list[int]:
        """The partners that have closed their connection, after one broke here that no failure explains."""
        if monitor is not None and monitor.wait_for_cause(_CAUSE_SECONDS) is not None:
            return []
        found = {
            rank
            for members, communicator in self._groups
            for rank in self._expected.closed_by(communicator.name, members)
        }
        return sorted(found)

    def abort(self) -> None:
        """End all waits for partners, here and there; any thread may call it."""
        self._unbroken.clear()
        for group in list(self._groups):
            group.communicator.abort()

    def close(self) -> None:
        """Close all connections."""
        self._groups.clear()
        self._close()


def _close(communicators: Sequence[Communicator], unbroken: Sequence[str], expected: ExpectedPartners) -> None:
    for name in unbroken:
        expected.closed(name)
    for communicator in communicators:
        communicator.close()


def _collectives(config: ExecutionConfig, *, same_data: bool) -> dict[str, str]:
    """The order of what partners do together: of all actions if they have the same data, as with DTensors."""
    schedule = config.schedule
    if same_data:
        return {"schedule": f"{schedule.name} ({schedule_digest(schedule)})"}
    kinds = (Kind.UNSHARD, Kind.REDUCE_GRAD) if config.replication.shards else (Kind.REDUCE_GRAD,)
    own = [str(step) for step in schedule.ranks[config.rank] if step.kind in kinds]
    order = " ".join(own)
    return {f"order of {' and '.join(map(str, kinds))}": order if len(own) <= 8 else digest(order)}


def _layout(config: ExecutionConfig) -> str:
    """The shapes and types of this rank's parameters, and which are trained: what collectives depend on."""
    parameters = [each for _, module in sorted(config.trained.items()) for each in module.parameters()]
    text = " ".join(f"{tuple(each.shape)} {each.dtype} {each.requires_grad}" for each in parameters)
    trained = sum(each.requires_grad for each in parameters)
    return f"{trained} of {len(parameters)} are trained (digest of shapes {digest(text)})"


def _shortened(name: str) -> str:
    """The end of a name that fits into an announcement, where a character may take up to 12 bytes."""
    while len(json.dumps(name)) > _LONGEST_NAME:
        name = name[1:]
    return name
