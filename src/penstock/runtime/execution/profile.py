"""Measured timelines of steps on all ranks, on one clock, and the costs derived from them.

    with pipeline.profile() as profile:
        pipeline.step(x, target=y)
    profile.timeline.makespan, profile.costs.forward

The time of an action is that of its own work; waiting for a message is before its start.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from penstock.cost.costs import Costs
from penstock.errors import PipelineError
from penstock.ir.kinds import Kind
from penstock.ir.table import Ints
from penstock.runtime.execution.clocks import Clocks, DeviceClock, HostClock, compare_clocks
from penstock.runtime.execution.connection import Connection
from penstock.runtime.execution.link_measurement import LinkCosts, link_costs, measure_links
from penstock.runtime.execution.live_bytes import LiveBytes
from penstock.runtime.execution.program import Program
from penstock.runtime.transport.communicator import gather_arrays
from penstock.simulation.calibration import calibrate
from penstock.simulation.measured import measured_timeline
from penstock.simulation.timeline import Timeline

__all__ = ["Profile", "Recorder"]


@dataclass
class Profile:
    """The recorded timelines, one for each step or eval, in order."""

    clocks: Clocks
    timelines: list[Timeline] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    """When each of them started, in seconds of rank 0's clock."""
    live_bytes: list[list[Ints]] = field(default_factory=list)
    """For each step in which bytes were counted, per rank: the bytes held after each step of its list."""

    def _require_steps(self) -> None:
        if not self.timelines:
            raise PipelineError("nothing was recorded: call step() or eval() inside `with pipeline.profile()`")

    @property
    def timeline(self) -> Timeline:
        """The timeline of median makespan, with the period of all recorded steps."""
        self._require_steps()
        ordered = sorted(self.timelines, key=lambda timeline: timeline.makespan)
        return replace(ordered[(len(ordered) - 1) // 2], period=self.period)

    @property
    def period(self) -> float | None:
        """Mean seconds from the start of a recorded step to that of the next; None for a single step."""
        if len(self.starts) < 2:
            return None
        return (self.starts[-1] - self.starts[0]) / (len(self.starts) - 1)

    @property
    def costs(self) -> Costs:
        """The mean costs of all recorded steps of the same schedule as the last one."""
        self._require_steps()
        last = self.timelines[-1].schedule
        return calibrate([timeline for timeline in self.timelines if timeline.schedule == last])


class Recorder:
    """Runs programs with a clock, and gathers the times of all ranks."""

    def __init__(self, connection: Connection, *, memory: bool) -> None:
        """`memory`: count bytes, which a schedule with OFFLOAD needs for the speed of the host link."""
        config, communicator = connection.config, connection.communicator
        self._rank = config.rank
        self._ranks = len(config.members)
        self._network = measure_links(communicator, config.schedule, self._rank)
        self.profile = Profile(compare_clocks(communicator, self._rank, self._ranks))
        self._clock: Any = HostClock() if config.device.type == "cpu" else DeviceClock(config.device)
        counts = memory or config.schedule.table.has(Kind.OFFLOAD)
        self._bytes = LiveBytes(config.schedule.num_stages) if counts else None
        self._times: Any = None
        self._start = 0.0
        self._levels: list[Ints] | None = None

    def run(self, connection: Connection, program: Program) -> None:
        """Run a step and keep its times."""
        if self._bytes is None:
            marks = program.run_timed(self._clock.now)
        else:
            with self._bytes.counting(connection, program) as after:
                marks = program.run_timed(self._clock.now, after)
        self._times = np.array(self._clock.nanoseconds(marks), dtype=np.int64).reshape(-1, 2)

    def gathered(self, connection: Connection, program: Program) -> Timeline:
        """The timeline of the last step, the same on every rank."""
        schedule, communicator = program.schedule, connection.communicator
        offset = round(self.profile.clocks.offsets[self._rank] * 1e9)
        rows = gather_arrays(communicator, self._times - offset, [len(row) for row in schedule.ranks])
        times = np.concatenate(rows) if rows else np.zeros((0, 2), dtype=np.int64)
        first = times[:, 0].min()
        seconds = (times - first) / 1e9
        sizes = gather_arrays(communicator, _sizes(connection), [len(schedule.graph.edges)] * self._ranks)
        links = _link_costs(self._network, np.maximum.reduce(sizes))
        if self._bytes is not None and program is connection.programs["step"]:
            links = self._bytes.costs(communicator, schedule, links)
            self._levels = self._bytes.gathered(communicator, schedule, self._rank)
        self._start = float(first / 1e9)
        before = self.profile.starts[-1:]
        period = self._start - before[0] if before else None
        return measured_timeline(schedule, seconds, links, period)

    def keep(self, timeline: Timeline) -> None:
        """Add the timeline of the last step, which has succeeded, to the profile."""
        self.profile.timelines.append(timeline)
        self.profile.starts.append(self._start)
        if self._levels is not None:
            self.profile.live_bytes.append(self._levels)
            self._levels = None


def _sizes(connection: Connection) -> Ints:
    """Per edge, as far as this rank sends on it: bytes of an activation message and of a gradient message."""
    graph = connection.config.schedule.graph
    found = np.zeros((len(graph.edges), 2), dtype=np.int64)
    for (kind, stage, peer), size in connection.message_sizes().items():
        edge = graph.number[(stage, peer) if kind is Kind.SEND_F else (peer, stage)]
        found[edge, int(kind is Kind.SEND_B)] = size
    return found


def _link_costs(network: LinkCosts, sizes: Ints) -> Costs:
    """Costs of messages alone: the measured links, and the bytes that were sent."""
    return replace(
        link_costs(network),
        activation_message=tuple(sizes[:, 0].tolist()) or 0.0,
        gradient_message=tuple(sizes[:, 1].tolist()) or 0.0,
    )
