"""Measured timelines of steps on all ranks, on one clock, with live bytes, links and costs."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch

from penstock.cost.costs import Costs
from penstock.errors import PipelineError
from penstock.ir.action import WorkUnit
from penstock.ir.encoding import Floats, Ints
from penstock.ir.kinds import Kind
from penstock.ir.schedule import Schedule
from penstock.runtime.program.program import Program
from penstock.runtime.session.connection import Connection
from penstock.runtime.stage.stage import Stage
from penstock.runtime.transport.buffer_pool import Buffer
from penstock.runtime.transport.communicator import Communicator, ControlMessage, gather_arrays
from penstock.runtime.transport.transport_errors import wait
from penstock.simulation.calibration import calibrate, measured_timeline
from penstock.simulation.timeline import Timeline

# --- clocks --------------------------------------------------------------------------------------------

_ROUNDS = 20


@dataclass(frozen=True)
class Clocks:
    """Per rank: how far its clock is ahead of rank 0's, in seconds, and the largest error of that.

    Ranks of one machine read the same clock. The clocks of other machines are compared with rank 0's by round
    trips, and are correct to within half of the fastest round trip.
    """

    offsets: tuple[float, ...]
    uncertainty: tuple[float, ...]


class HostClock:
    """The clock of the host, in nanoseconds."""

    now = staticmethod(perf_counter_ns)

    def nanoseconds(self, marks: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """The marks themselves."""
        return marks


class DeviceClock:
    """Events on a device's stream, converted to the host's nanoseconds at the end."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> torch.Event:
        """An event at this point of the stream."""
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def nanoseconds(self, marks: list[tuple[torch.Event, torch.Event]]) -> list[tuple[int, int]]:
        """The times of the events on the host's clock; waits for all of them."""
        last = self.now()
        last.synchronize()
        host = perf_counter_ns()
        return [
            (host - round(begin.elapsed_time(last) * 1e6), host - round(end.elapsed_time(last) * 1e6))
            for begin, end in marks
        ]


def compare_clocks(communicator: Communicator | None, rank: int, ranks: int) -> Clocks:
    """Let rank 0 ask every other rank for its time, several times; the fastest round trip counts."""
    if communicator is None:
        return Clocks((0.0,), (0.0,))
    found = np.zeros((ranks, 2), dtype=np.int64)
    token = torch.zeros(2, dtype=torch.int64)
    tag = communicator.control_tag(ControlMessage.CLOCK)
    for other in range(1, ranks):
        answers = []
        for _ in range(_ROUNDS if rank in (0, other) else 0):
            if rank == other:
                wait(communicator.receive_host(token, 0, tag))
                token[0], token[1] = perf_counter_ns(), _boot_id()
                wait(communicator.send_host(token, 0, tag))
                continue
            begin = perf_counter_ns()
            wait(communicator.send_host(token, other, tag))
            wait(communicator.receive_host(token, other, tag))
            end = perf_counter_ns()
            answers.append((end - begin, int(token[0]) - (begin + end) // 2))
        same_clock = int(token[1]) == _boot_id() != -1
        if answers and not same_clock:
            taken, offset = min(answers)
            found[other] = offset, taken // 2
    offsets = gather_arrays(communicator, found, [ranks] * ranks)[0] / 1e9
    return Clocks(tuple(offsets[:, 0].tolist()), tuple(offsets[:, 1].tolist()))


def _boot_id() -> int:
    """Return a number for this machine since its boot; processes with the same number read the same clock."""
    with suppress(OSError):
        return zlib.crc32(Path("/proc/sys/kernel/random/boot_id").read_bytes())
    return -1


# --- links ---------------------------------------------------------------------------------------------

_SMALL_BYTES, LARGE_BYTES = 64, 1 << 20


def link_costs(links: Ints) -> Costs:
    """Return costs of measured links alone; an edge within a rank is as fast as the fastest link."""
    latency, transfer = links.T
    between_ranks = transfer > 0
    bandwidth = None
    if between_ranks.any():
        fastest = transfer[between_ranks].min()
        bandwidth = _listed(LARGE_BYTES / (np.where(between_ranks, transfer, fastest) / 1e9))
    return Costs(latency=_listed(latency / 1e9) or 0.0, bandwidth=bandwidth)


def measure_links(communicator: Communicator | None, schedule: Schedule, rank: int) -> Ints:
    """Measure each edge by round trips of small and large messages, one edge after the other.

    Return per edge the nanoseconds of a small message, and how many more a large one takes; 0 within a rank.
    """
    rank_of_stage, edges = schedule.placement.stage_to_rank, schedule.graph.edges
    found = np.zeros((len(edges), 2), dtype=np.int64)
    for edge, ends in enumerate(edges):
        here, there = (rank_of_stage[stage] for stage in ends)
        if communicator is not None and here != there and rank in (here, there):
            channels = 2 * int(schedule.table.carrier[edge]), 2 * edge + 1
            small, large = (
                _round_trip(communicator, channels, there if rank == here else here, size, first=rank == here)
                for size in (_SMALL_BYTES, LARGE_BYTES)
            )
            found[edge] = small // 2, max((large - small) // 2, 1)  # which may be noise
    measured: Ints = np.maximum.reduce(gather_arrays(communicator, found, [len(edges)] * schedule.num_ranks))
    return measured


def _round_trip(
    communicator: Communicator, channels: tuple[int, int], peer: int, size: int, *, first: bool
) -> int:
    """Return the nanoseconds of the fastest of several round trips on the two channels of an edge."""
    up, down = channels
    tags = [communicator.control_tag(ControlMessage.PING) + channel % 2 for channel in (up, down)]
    message = Buffer(size, communicator.device)
    best = 1 << 62
    for _ in range(_ROUNDS):
        begin = perf_counter_ns()
        if first:
            wait(communicator.send(message, peer, up, tags[0]))
            wait(communicator.receive(message, peer, down, tags[1]))
        else:
            wait(communicator.receive(message, peer, up, tags[0]))
            wait(communicator.send(message, peer, down, tags[1]))
        if communicator.device.type != "cpu":
            torch.accelerator.synchronize()
        best = min(best, perf_counter_ns() - begin)
    return best


# --- live bytes ----------------------------------------------------------------------------------------

_NAMES = ("activation", "checkpoint", "offloadable", "after_input")


class LiveBytes:
    """Counts what the stages of a rank hold for their backwards after each action of its list.

    Counted are the same things as in the simulated memory (`penstock.cost.memory`): what each microbatch holds
    of its forward (`Stage.held_bytes`), and receive buffers from the posted receive on. The largest bytes
    of each stage become costs.
    """

    def __init__(self, num_stages: int) -> None:
        self._held: dict[WorkUnit, int] = {}
        self._levels: list[int] = []
        self._most = np.zeros((num_stages, len(_NAMES)), dtype=np.int64)

    @contextmanager
    def counting(self, connection: Connection, program: Program) -> Iterator[Callable[[int], None]]:
        """Yield what has to be called after each action of the list, with its index."""
        self._held.clear()
        self._levels.clear()
        stages = connection.stages

        def after(position: int) -> None:
            level = self._levels[-1] if self._levels else 0
            self._levels += [level] * (position - len(self._levels))  # actions without a call change nothing
            for part in program.steps[position].parts:
                if part.microbatch is not None and not part.kind.is_point:
                    self._count(stages[part.stage], part.kind, part.work_unit)
            self._levels.append(connection.sources.receive_buffer_bytes() + sum(self._held.values()))

        for stage in stages.values():
            stage.counts_bytes = True
        try:
            yield after
        finally:
            for stage in stages.values():
                stage.counts_bytes = False

    def _count(self, stage: Stage, kind: Kind, unit: WorkUnit) -> None:
        index, microbatch = unit
        recomputed = stage.is_recomputed(microbatch)
        before = self._held.get(unit, 0)
        held, inputs = stage.held_bytes(microbatch)
        self._held[unit] = held
        if kind is Kind.F and recomputed:
            self._note("checkpoint", index, held)
        elif kind in (Kind.F, Kind.RECOMPUTE):
            self._note("activation", index, held)
            self._note("checkpoint", index, inputs)
        elif kind is Kind.OFFLOAD and not recomputed:
            self._note("offloadable", index, before - held)
        elif kind is Kind.I:
            self._note("after_input", index, held)

    def _note(self, name: str, stage: int, size: int) -> None:
        entry = stage, _NAMES.index(name)
        self._most[entry] = max(self._most[entry], size)

    def gathered(self, communicator: Communicator | None, schedule: Schedule, rank: int) -> list[Ints]:
        """Return per rank the bytes held after each action of its list, the same on every rank."""
        missing = len(schedule.ranks[rank]) - len(self._levels)
        levels = [*self._levels, *self._levels[-1:] * missing]
        lengths = [len(row) for row in schedule.ranks]
        return gather_arrays(communicator, np.array(levels, dtype=np.int64), lengths)

    def costs(self, communicator: Communicator | None, schedule: Schedule, links: Costs) -> Costs:
        """Return these costs with the most bytes of each stage that were counted, the same on every rank."""
        gathered = gather_arrays(communicator, self._most, [len(self._most)] * schedule.num_ranks)
        most: Floats = np.maximum.reduce(gathered).astype(np.float64)
        full, kept, moved, after = most.T
        table = schedule.table
        return replace(
            links,
            activation=_listed(full),
            checkpoint=_listed(np.minimum(kept, full)),
            offloadable=_listed(np.where(moved > 0, moved, full)) if table.has(Kind.OFFLOAD) else None,
            activation_freed_by_input=_listed(full - after if table.has(Kind.I) else 0 * full),
        )


def _listed(values: Floats) -> tuple[float, ...]:
    return tuple(values.tolist())


# --- timelines -----------------------------------------------------------------------------------------


@dataclass
class Profile:
    """The recorded timelines, one for each step or eval, in order.

        with pipeline.profile() as profile:
            pipeline.step(x, target=y)
        profile.timeline.makespan, profile.costs.forward

    The time of an action is that of its own work; waiting for a message is before its start.
    """

    clocks: Clocks
    timelines: list[Timeline] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    """When each of them started, in seconds of rank 0's clock."""
    live_bytes: list[list[Ints]] = field(default_factory=list)
    """For each step in which bytes were counted, per rank: the bytes held after each action of its list."""

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
        self._links = measure_links(communicator, config.schedule, self._rank)
        self.profile = Profile(compare_clocks(communicator, self._rank, self._ranks))
        self._clock: Any = HostClock() if config.device.type == "cpu" else DeviceClock(config.device)
        counts = memory or config.schedule.table.has(Kind.OFFLOAD)
        self._bytes = LiveBytes(config.schedule.num_stages) if counts else None
        self._times: Any = None
        self._start = 0.0
        self._levels: list[Ints] | None = None

    def run(self, connection: Connection, program: Program) -> None:
        """Run a step and keep its times."""
        counting = nullcontext() if self._bytes is None else self._bytes.counting(connection, program)
        with counting as after:
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
        activation, gradient = np.maximum.reduce(sizes).T.tolist()
        links = replace(
            link_costs(self._links),
            activation_message=tuple(activation) or 0.0,
            gradient_message=tuple(gradient) or 0.0,
        )
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
    """Return per edge on which this rank sends: bytes of an activation message and of a gradient message."""
    graph = connection.config.schedule.graph
    found = np.zeros((len(graph.edges), 2), dtype=np.int64)
    for (kind, stage, peer), channel in connection.channels.sends.items():
        edge = graph.number[(stage, peer) if kind is Kind.SEND_F else (peer, stage)]
        found[edge, int(kind is Kind.SEND_B)] = channel.max_nbytes
    return found
