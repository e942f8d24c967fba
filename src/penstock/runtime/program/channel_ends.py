"""This rank's ends of the channels between ranks."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from functools import partial
from typing import TypeAlias

from penstock.ir.kinds import Kind
from penstock.ir.schedule import Schedule
from penstock.runtime.dtensors import Meshes
from penstock.runtime.stage.stage import Stage
from penstock.runtime.stage.values import SharedValues, Source, joined_gradients, joined_inputs, one_source
from penstock.runtime.transport.buffer_pool import BufferPool
from penstock.runtime.transport.channels import ReceiveChannel, SendChannel
from penstock.runtime.transport.communicator import Communicator

ChannelKey: TypeAlias = tuple[Kind, int, int]
"""The kind and the stage of an action, and the stage at the other end."""


def receiving_stage(schedule: Schedule, source: int, target: int) -> int:
    """The stage whose receive brings what `source` returns to `target`, for all stages of its rank."""
    graph = schedule.graph
    return graph.edges[int(schedule.table.carrier[graph.number[source, target]])][1]


def needed_channels(schedule: Schedule, kind: Kind, stage: int) -> list[ChannelKey]:
    """Return the channels, of RECV_F or RECV_B, of what a stage needs, also of what is on its own rank."""
    if kind is Kind.RECV_B:
        return [(kind, stage, other) for other in schedule.graph.outputs(stage)]
    return [(kind, receiving_stage(schedule, other, stage), other) for other in schedule.graph.inputs(stage)]


def channels_between_ranks(schedule: Schedule) -> list[tuple[int, int, int]]:
    """Number, sending rank and receiving rank of every channel between ranks, in the same order on all ranks.

    Channel 2e carries activations along edge e of the stage graph, channel 2e + 1 the gradients back. An
    activation that several stages of a rank use has one channel.
    """
    rank_of_stage = schedule.placement.stage_to_rank
    found = []
    for edge, (source, target) in enumerate(schedule.graph.edges):
        here, there = rank_of_stage[source], rank_of_stage[target]
        if here != there:
            if schedule.table.carrier[edge] == edge:
                found.append((2 * edge, here, there))
            found.append((2 * edge + 1, there, here))
    return found


def peers_of(schedule: Schedule, rank: int) -> list[int]:
    """The ranks with which a rank compares its calls: those that it exchanges messages with.

    Ranks between which no message goes, not even by way of others, are joined by their lowest ranks.
    """
    pairs = [(source, target) for _, source, target in channels_between_ranks(schedule)]
    part = list(range(schedule.num_ranks))  # per rank: the lowest rank that it is joined with
    for one, other in pairs:
        low, high = sorted((part[one], part[other]))
        part = [low if each == high else each for each in part]
    pairs += [(0, lowest) for lowest in set(part) - {0}]
    return sorted({end for pair in pairs if rank in pair for end in pair} - {rank})


class ChannelEnds:
    """The channel ends of one rank; none without a communicator.

    They are by the kind and the stage of their action and the stage at the other end.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        communicator: Communicator | None,
        pool: BufferPool,
        meshes: Meshes,
    ) -> None:
        self.sends: dict[ChannelKey, SendChannel] = {}
        self.receives: dict[ChannelKey, ReceiveChannel] = {}
        self._microbatches = schedule.microbatches
        if communicator is None:
            return
        for number, source, target in channels_between_ranks(schedule):
            common = (communicator, pool, number, target if rank == source else source, schedule.microbatches)
            edge, back = divmod(number, 2)
            feeds, fed = schedule.graph.edges[edge]
            if rank == source:
                kind, stage, other = (Kind.SEND_B, fed, feeds) if back else (Kind.SEND_F, feeds, fed)
                name = f"stage {stage}, {'gradients to' if back else 'output for'} rank {target}"
                self.sends[kind, stage, other] = SendChannel(*common, name)
            elif rank == target:
                kind, stage, other = (Kind.RECV_B, feeds, fed) if back else (Kind.RECV_F, fed, feeds)
                self.receives[kind, stage, other] = ReceiveChannel(*common, f"stage {stage}", meshes=meshes)

    @property
    def _all(self) -> tuple[SendChannel | ReceiveChannel, ...]:
        return (*self.sends.values(), *self.receives.values())

    def set_mode(self, *, training: bool) -> None:
        """Use the message specs of training or of eval."""
        for channel in self._all:
            channel.offset = 0 if training else self._microbatches

    def abandon(self) -> None:
        """Release everything that refers to the connections."""
        for channel in self._all:
            channel.abandon()


class ValueSources:
    """Where the stages `own` of one rank get inputs and gradients from: channels, or each other."""

    def __init__(self, schedule: Schedule, channels: ChannelEnds, own: Collection[int]) -> None:
        self.stages: weakref.WeakValueDictionary[int, Stage] = weakref.WeakValueDictionary()
        """The stages of this rank, which take values from each other."""
        self._schedule, self._receives, self._own = schedule, channels.receives, own
        self._shared: dict[ChannelKey, SharedValues] = {}

    def inputs(self, index: int) -> Source | None:
        """Return the outputs of the stages that feed this one; None if it gets the batch."""
        return one_source(self._sources(Kind.RECV_F, index), joined_inputs)

    def gradients(self, index: int) -> Source | None:
        """Return the gradients from the stages that this one feeds; None if it has a loss."""
        return one_source(self._sources(Kind.RECV_B, index), joined_gradients)

    def receive_buffer_bytes(self) -> int:
        """Bytes of messages whose receive is posted and that a stage has still to use."""
        held = sum(channel.held_bytes for channel in self._receives.values())
        return held + sum(shared.held_bytes for shared in self._shared.values())

    def _sources(self, kind: Kind, index: int) -> list[Source]:
        return [self._source(index, key) for key in needed_channels(self._schedule, kind, index)]

    def _source(self, index: int, key: ChannelKey) -> Source:
        """Return where a stage gets a value from: a channel, which several may share, or another stage."""
        kind, _, other = key
        if (channel := self._receives.get(key)) is None:
            stages = self.stages
            return lambda microbatch: stages[other].take_value(microbatch, index)
        consumers = [stage for stage in self._schedule.graph.outputs(other) if stage in self._own]
        if kind is Kind.RECV_B or len(consumers) == 1:
            return channel.take
        return partial(self._shared.setdefault(key, SharedValues(consumers, channel.take)).take, index)
