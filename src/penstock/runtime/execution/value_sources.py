"""Where a stage gets its inputs and gradients from: channels from other ranks, or other stages of its rank."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from functools import partial

from penstock.ir.action import Kind
from penstock.ir.schedule import Schedule
from penstock.runtime.execution.channel_ends import ChannelEnds, receiving_stage
from penstock.runtime.execution.joined_inputs import Source, joined_gradients, joined_inputs, one_source
from penstock.runtime.execution.shared_values import SharedInputs
from penstock.runtime.execution.stage import Stage
from penstock.runtime.transport.channels import FlatValue

__all__ = ["ValueSources"]


class ValueSources:
    """The sources of all stages of one rank, whose numbers are `own`."""

    def __init__(self, schedule: Schedule, channels: ChannelEnds, own: Collection[int]) -> None:
        self.stages: weakref.WeakValueDictionary[int, Stage] = weakref.WeakValueDictionary()
        """The stages of this rank, which take values from each other."""
        self._schedule, self._receives, self._own = schedule, channels.receives, own
        self._shared: dict[tuple[Kind, int, int], SharedInputs] = {}

    def inputs(self, index: int) -> Source | None:
        """The outputs of the stages that feed this one; None if it gets the batch."""
        inputs = self._schedule.graph.inputs(index)
        return one_source([self._input(index, other) for other in inputs], joined_inputs)

    def gradients(self, index: int) -> Source | None:
        """The gradients from the stages that this one feeds; None if it has a loss."""
        outputs = self._schedule.graph.outputs(index)
        return one_source([self._gradient(index, other) for other in outputs], joined_gradients)

    def receive_buffer_bytes(self) -> int:
        """Bytes of messages whose receive is posted and that a stage has still to use."""
        held = sum(channel.held_bytes for channel in self._receives.values())
        return held + sum(shared.held_bytes for shared in self._shared.values())

    def _input(self, index: int, other: int) -> Source:
        key = Kind.RECV_F, receiving_stage(self._schedule, other, index), other
        if (channel := self._receives.get(key)) is None:
            return partial(_local_output, self.stages, other, index)
        consumers = [stage for stage in self._schedule.graph.outputs(other) if stage in self._own]
        if len(consumers) == 1:
            return channel.take
        return partial(self._shared.setdefault(key, SharedInputs(channel.take, consumers)).take, index)

    def _gradient(self, index: int, other: int) -> Source:
        if (channel := self._receives.get((Kind.RECV_B, index, other))) is not None:
            return channel.take
        return partial(_local_input_gradient, self.stages, other, index)


def _local_output(stages: Mapping[int, Stage], index: int, consumer: int, microbatch: int) -> FlatValue:
    return stages[index].take_output(microbatch, consumer)


def _local_input_gradient(stages: Mapping[int, Stage], index: int, source: int, microbatch: int) -> FlatValue:
    return stages[index].take_input_gradient(microbatch, source)
