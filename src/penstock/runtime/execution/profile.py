"""Measured timelines of steps on all ranks, on one clock, and the costs derived from them.

    with pipeline.profile() as profile:
        pipeline.step(x, target=y)
    profile.timeline.makespan, profile.costs.forward

The time of a step of the list is that of its own work; waiting for a message is before its start.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.cost.costs import Costs
from penstock.errors import PipelineError
from penstock.ir.action import Kind
from penstock.ir.schedule import Schedule
from penstock.ir.table import Floats
from penstock.runtime.execution.clocks import Clocks, DeviceClock, HostClock, compare_clocks
from penstock.runtime.execution.connection import Connection
from penstock.runtime.execution.link_measurement import LinkCosts, measure_links
from penstock.runtime.execution.program import Program
from penstock.runtime.transport.communicator import gather_arrays
from penstock.simulation.network import Moved, Run
from penstock.simulation.simulator import Engine
from penstock.simulation.timeline import Timeline
from penstock.validation.communication import Messages

__all__ = ["Profile", "Recorder"]


@dataclass
class Profile:
    """The recorded timelines, one for each step or eval, in order."""

    clocks: Clocks
    timelines: list[Timeline] = field(default_factory=list)

    @property
    def timeline(self) -> Timeline:
        """The timeline of median makespan."""
        if not self.timelines:
            raise PipelineError("nothing was recorded: call step() or eval() inside `with pipeline.profile()`")
        return sorted(self.timelines, key=lambda timeline: timeline.makespan)[(len(self.timelines) - 1) // 2]

    @property
    def costs(self) -> Costs:
        """The costs derived from the timeline of median makespan."""
        return self.timeline.costs


class Recorder:
    """Runs programs with a clock, and gathers the times of all ranks."""

    def __init__(self, connection: Connection) -> None:
        config, communicator = connection.config, connection.communicator
        self._rank = config.rank
        self._ranks = len(config.members)
        self._network = measure_links(communicator, config.schedule, self._rank)
        self.profile = Profile(compare_clocks(communicator, self._rank, self._ranks))
        self._clock: Any = HostClock() if config.device.type == "cpu" else DeviceClock(config.device)
        self._times: Any = None

    def run(self, program: Program) -> None:
        """Run a step and keep its times."""
        marks = program.run_timed(self._clock.now)
        self._times = np.array(self._clock.nanoseconds(marks), dtype=np.int64).reshape(-1, 2)

    def gathered(self, connection: Connection, program: Program) -> Timeline:
        """The timeline of the last step, the same on every rank."""
        schedule, communicator = program.schedule, connection.communicator
        offset = round(self.profile.clocks.offsets[self._rank] * 1e9)
        rows = gather_arrays(communicator, self._times - offset, [len(row) for row in schedule.ranks])
        times = np.concatenate(rows) if rows else np.zeros((0, 2), dtype=np.int64)
        times = (times - times[:, 0].min()) / 1e9
        sizes = gather_arrays(communicator, _sizes(connection), [schedule.num_stages] * self._ranks)
        costs = _derived(schedule, times, np.maximum.reduce(sizes), self._network)
        run = Run(times[:, 0].copy(), times[:, 1].copy(), _moved(schedule, times, costs))
        timeline = Timeline(schedule, costs, run, Engine(schedule, costs).run)
        self.profile.timelines.append(timeline)
        return timeline


# --- from times to costs ---------------------------------------------------------------------------


def _sizes(connection: Connection) -> Any:
    """Per stage of this rank: bytes of the messages with its output, and with the gradient of its input."""
    found = np.zeros((connection.config.schedule.num_stages, 2), dtype=np.int64)
    for (kind, stage), size in connection.message_sizes().items():
        found[stage, int(kind is Kind.SEND_B)] = size
    return found


def _derived(schedule: Schedule, times: Floats, sizes: Any, network: LinkCosts) -> Costs:
    """The median time of each kind of compute action on each stage, and the overhead of all other steps."""
    taken = times[:, 1] - times[:, 0]
    alone: dict[tuple[Kind, int], list[float]] = {}
    other = compute = 0.0
    for slot, step in enumerate(step for row in schedule.ranks for step in row):
        parts = step.parts
        if len(parts) == 1 and parts[0].kind.is_compute:
            alone.setdefault((parts[0].kind, parts[0].stage), []).append(float(taken[slot]))
        compute += parts[0].kind.is_compute
        other += 0.0 if parts[0].kind.is_compute else float(taken[slot])
    middle = {key: statistics.median(values) for key, values in alone.items()}
    forward = _per_stage(schedule, middle, Kind.F, ())
    whole = _per_stage(schedule, middle, Kind.B, forward)
    halves = tuple(seconds / 2 for seconds in whole)
    measured = [speed for speed in network.bandwidth if speed]
    return Costs(
        forward=forward,
        backward_input=_per_stage(schedule, middle, Kind.I, halves),
        backward_weight=_per_stage(schedule, middle, Kind.W, halves),
        backward=whole if any(kind is Kind.B for kind, _ in middle) else None,
        launch_overhead=other / compute if compute else 0.0,
        latency=network.latency or 0.0,
        bandwidth=tuple(speed or max(measured) for speed in network.bandwidth) if measured else None,
        activation_message=tuple(sizes[:-1, 0].tolist()) or 0.0,
        gradient_message=tuple(sizes[1:, 1].tolist()) or 0.0,
    )


def _per_stage(
    schedule: Schedule, middle: dict[tuple[Kind, int], float], kind: Kind, otherwise: Iterable[float]
) -> tuple[float, ...]:
    """Per stage; where the kind never ran alone, the mean of the other stages, or else the fallback."""
    known = [seconds for (k, _), seconds in middle.items() if k is kind]
    fallback = list(otherwise) or [0.0] * schedule.num_stages
    mean = statistics.fmean(known) if known else None
    return tuple(
        middle.get((kind, stage), fallback[stage] if mean is None else mean)
        for stage in range(schedule.num_stages)
    )


def _moved(schedule: Schedule, times: Floats, costs: Costs) -> Moved | None:
    """When messages left and arrived: after the latency and the send, at the latest when they were used."""
    messages = Messages.of(schedule.table)
    there = messages.used
    if not there.any():
        return None
    slot = schedule.table.slot
    send, receive, consumer = (
        slot[part[there]] for part in (messages.send, messages.receive, messages.consumer)
    )
    begin = times[send, 0]
    stage = schedule.table.stage[messages.send[there]]
    edge = np.where(schedule.table.kind[messages.send[there]] == Kind.SEND_F.number, stage, stage - 1)
    lag = np.array(costs.per_edge("latency", schedule.num_stages))[edge]
    arrival = np.minimum(np.maximum(begin + lag, times[send, 1]), times[consumer, 0])
    return Moved(send, receive, begin, np.maximum(arrival, begin))
