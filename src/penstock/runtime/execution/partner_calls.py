"""Compares the calls of a rank with those of its partners: ranks of other pipelines in the same collectives.

Partners are replicas, ranks with other shards of the same parameters, and tensor-parallel ranks. Those of one
process group tell each other their calls before the first collective of a call. Collectives of different calls
would be mixed up, or gloo would end the process.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from penstock.arguments import listed
from penstock.errors import PipelineError
from penstock.ir.kinds import Kind
from penstock.runtime.data_parallel.gradient_norm import model_groups
from penstock.runtime.execution.call_agreement import announced_facts, announcement
from penstock.runtime.execution.config import ExecutionConfig
from penstock.runtime.execution.expected_partners import ExpectedPartners
from penstock.runtime.failure.agreement import differences, digest, facts_in, schedule_digest
from penstock.runtime.failure.connecting import connecting, raise_if_ended
from penstock.runtime.failure.monitor import FailureMonitor
from penstock.runtime.transport.communicator import Communicator
from penstock.runtime.transport.transport_errors import TransportError

__all__ = ["PartnerCalls", "partners_of"]

_HEADING = "world ranks of several pipelines that train the same stages differ:"
_ADVICE = (
    "Every pipeline must make the same calls in the same order, and replicas must be trained alike: look for "
    "a call or an option of the optimizer that depends on the rank, a data loader with fewer batches on one "
    "rank, or an exception that one rank caught"
)
_BYTES = 512
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
            if lines := differences({member: facts_in(text) for member, text in zip(members, texts)}):
                raise PipelineError("\n".join([_HEADING, *lines]))
            self._groups.append(_Partners(members, communicator))
        self._unbroken.extend(group.communicator.name for group in self._groups)
        own = config.members[config.rank]
        self.ranks = sorted({rank for group in self._groups for rank in group.members} - {own})
        """The world ranks of all partners."""

    @property
    def awaited(self) -> str:
        """What a rank waits for that compares its call, for messages."""
        return f"the call of world rank {listed(self.ranks)}, which trains the same stages in another pipeline"

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
            own = announcement({**call, **layout, **values}, _BYTES)
            if not communicator.all_equal(own):
                announced = communicator.all_gather(own)
                with suppress(TransportError):
                    communicator.barrier()  # the first to raise ends the connections, when all have these
                calls = {member: announced_facts(each) for member, each in zip(members, announced)}
                raise PipelineError("\n".join([_HEADING, *differences(calls), _ADVICE]))

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
