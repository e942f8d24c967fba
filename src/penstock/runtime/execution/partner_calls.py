"""Compares the calls of a rank with those of its partners: ranks of other pipelines in the same collectives.

Partners are replicas, ranks with other shards of the same parameters, and tensor-parallel ranks. Those of one
process group form a ring; each compares its call with both neighbours before the first collective of a call.
Collectives of different calls would be mixed up, or gloo would end the process.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from penstock.errors import PipelineError
from penstock.formats import dumps
from penstock.ir.kinds import Kind
from penstock.runtime.data_parallel.gradient_norm import model_groups
from penstock.runtime.execution.call_agreement import CallAgreement
from penstock.runtime.execution.config import ExecutionConfig
from penstock.runtime.failure.agreement import differences
from penstock.runtime.failure.connecting import connecting, raise_if_ended
from penstock.runtime.transport.communicator import Communicator

__all__ = ["PartnerCalls", "partners_of"]

_HEADING = "world ranks of several pipelines that train the same stages differ:"
_ADVICE = (
    "Every pipeline must make the same calls in the same order, and replicas must be trained alike: look for "
    "a call or an option of the optimizer that depends on the rank, a data loader with fewer batches on one "
    "rank, or an exception that one rank caught"
)
_LONGEST_NAME = 100


def partners_of(config: ExecutionConfig) -> list[tuple[int, ...]]:
    """The world ranks of each process group that this rank shares with other pipelines."""
    pipeline = set(config.members)
    groups = model_groups(config.trained.values(), config.replication.groups)
    members = dict.fromkeys(tuple(dist.get_process_group_ranks(group)) for group in groups)
    return [ranks for ranks in members if len(ranks) > 1 and len(pipeline.intersection(ranks)) == 1]


class _Ring(NamedTuple):
    members: tuple[int, ...]
    communicator: Communicator
    calls: CallAgreement


class PartnerCalls:
    """One rank's part; all partners connect at the same time."""

    def __init__(self, config: ExecutionConfig, options: Mapping[str, object]) -> None:
        """`options` are compared with those of the partners once."""
        self._config = config
        self._rings: list[_Ring] = []
        self._close = weakref.finalize(self, _close, communicators := list[Communicator]())
        replicas = {rank for group in config.replication.groups for rank in dist.get_process_group_ranks(group)}
        self._have_same_data = False
        """Whether some partners compute on the same data as this rank, in collectives of every forward."""
        for members in partners_of(config):
            same_data = not replicas.issuperset(members)
            self._have_same_data |= same_data
            rank = members.index(config.members[config.rank])
            with connecting(config, members):
                communicator = Communicator(
                    *(members, rank, (), 1, torch.device("cpu"), config.timeout),
                    check=partial(raise_if_ended, members),
                )
                communicators.append(communicator)
                facts = {**options, **_collectives(config, same_data=same_data)}
                texts = communicator.exchange_texts("facts", json.dumps(facts))
            _check_facts(members, texts)
            peers = {(rank + step) % len(members) for step in (1, -1)}
            calls = CallAgreement(communicator, rank, peers, members, (_HEADING, _ADVICE))
            self._rings.append(_Ring(members, communicator, calls))

    def has_collectives_in_eval(self, *, with_loss: bool) -> bool:
        """Whether an eval on this rank needs its partners: to gather shards, or to add up losses."""
        config = self._config
        has_loss = with_loss and any(sink in config.modules for sink in config.losses)
        return self._have_same_data or bool(config.replication.shards) or has_loss

    def compare(self, call: Mapping[str, object], step: int | None = None) -> None:
        """Raise unless all partners make this call; in a step, also if replicas have diverged.

        Every step compares one of the parameters that replicas hold.
        """
        sample = {} if step is None else self._config.replication.sample(step)
        for ring in self._rings:
            ring.calls.begin({**call, **_values(sample, ring.members)})
        for ring in self._rings:
            ring.calls.check_all()

    def abort(self) -> None:
        """End all waits for partners, here and there; any thread may call it."""
        for ring in list(self._rings):
            ring.communicator.abort()

    def close(self) -> None:
        """Close all connections."""
        for ring in self._rings:
            ring.calls.abandon()
        self._rings.clear()
        self._close()


def _close(communicators: Sequence[Communicator]) -> None:
    for communicator in communicators:
        communicator.close()


def _collectives(config: ExecutionConfig, *, same_data: bool) -> dict[str, Any]:
    """The order of what partners do together: of all actions if they have the same data, as with DTensors."""
    schedule = config.schedule
    if same_data:
        text = dumps(schedule.renamed("any"), "json")
        return {"schedule": f"{schedule.name} ({hashlib.sha256(text.encode()).hexdigest()[:12]})"}
    kinds = (Kind.UNSHARD, Kind.REDUCE_GRAD) if config.replication.shards else (Kind.REDUCE_GRAD,)
    own = [str(step) for step in schedule.ranks[config.rank] if step.kind in kinds]
    shown = " ".join(own) if len(own) <= 8 else hashlib.sha256(" ".join(own).encode()).hexdigest()[:12]
    return {f"order of {' and '.join(map(str, kinds))}": shown}


def _check_facts(members: Sequence[int], texts: Sequence[str]) -> None:
    facts = {
        member: {topic: (value, value) for topic, value in json.loads(text).items()}
        for member, text in zip(members, texts)
    }
    if lines := differences(facts):
        raise PipelineError("\n".join([_HEADING, *lines]))


def _values(sample: Mapping[tuple[int, ...], tuple[str, int]], members: tuple[int, ...]) -> dict[str, object]:
    if (found := sample.get(members)) is None:
        return {}
    return {f"values of {found[0][-_LONGEST_NAME:]}": found[1]}
