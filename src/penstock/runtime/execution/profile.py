"""Measured timelines: what really happened on all ranks, on one clock, and the costs that follow from it.

    with pipeline.profile() as profile:
        pipeline.step(x, target=y)
    profile.timeline.makespan, profile.costs.forward

A step's time is that of its own work: waiting for a message comes before its start. Clocks of ranks on one
machine are the same clock; those of other machines are compared with rank 0's by messages there and back, and
are right to within half of the fastest way there and back (`Clocks.uncertainty`).
"""

from __future__ import annotations

import contextlib
import statistics
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np
import torch

from penstock.cost.costs import Costs
from penstock.errors import PipelineError
from penstock.ir.action import Kind
from penstock.ir.schedule import Schedule
from penstock.ir.table import Floats
from penstock.runtime.execution.connections import Wiring
from penstock.runtime.execution.program import Program
from penstock.runtime.transport.links import Links
from penstock.simulation.network import Moved, Run
from penstock.simulation.simulator import Engine
from penstock.simulation.timeline import Timeline
from penstock.validation.communication import Messages

__all__ = ["Clocks", "Profile", "Recorder"]

_CLOCK, _PING = 1, 2  # purposes of control messages
_ROUNDS = 20
_LARGE = 1 << 20


@dataclass(frozen=True)
class Clocks:
    """Per rank: how far its clock is ahead of rank 0's, in seconds, and how wrong that can be."""

    offsets: tuple[float, ...]
    uncertainty: tuple[float, ...]


class LinkCosts(NamedTuple):
    """Per edge between stages: seconds and bytes per second; 0 and None where the stages share a rank."""

    latency: tuple[float, ...]
    bandwidth: tuple[float | None, ...]


@dataclass
class Profile:
    """What was recorded: one timeline for each step, in order."""

    clocks: Clocks
    timelines: list[Timeline] = field(default_factory=list)

    @property
    def timeline(self) -> Timeline:
        """The step in the middle by length."""
        if not self.timelines:
            raise PipelineError("nothing was recorded: call step() or eval() inside `with pipeline.profile()`")
        return sorted(self.timelines, key=lambda timeline: timeline.makespan)[(len(self.timelines) - 1) // 2]

    @property
    def costs(self) -> Costs:
        """What the work costs, by the middle step."""
        return self.timeline.costs


class Recorder:
    """Runs programs with a clock in hand, and puts together what all ranks saw."""

    def __init__(self, wiring: Wiring) -> None:
        self._rank = wiring.plan.rank
        self._ranks = len(wiring.plan.members)
        self._network = _measured_links(wiring.links, wiring.plan.schedule, self._rank)
        self.profile = Profile(_compared_clocks(wiring.links, self._rank, self._ranks))
        self._clock: Any = (
            _HostClock() if wiring.plan.device.type == "cpu" else _DeviceClock(wiring.plan.device)
        )
        self._times: Any = None

    def __call__(self, program: Program) -> None:
        """Run a step and remember its times."""
        marks = program.run_timed(self._clock.now)
        self._times = np.array(self._clock.nanoseconds(marks), dtype=np.int64).reshape(-1, 2)

    def gathered(self, wiring: Wiring, program: Program) -> Timeline:
        """The timeline of the step that was run, the same on every rank."""
        schedule = program.schedule
        offset = round(self.profile.clocks.offsets[self._rank] * 1e9)
        rows = _all_gathered(wiring.links, self._times - offset, [len(row) for row in schedule.ranks])
        times = np.concatenate(rows) if rows else np.zeros((0, 2), dtype=np.int64)
        times = (times - times[:, 0].min()) / 1e9
        sizes = _all_gathered(wiring.links, _sizes(wiring), [schedule.num_stages] * self._ranks)
        costs = _derived(schedule, times, np.maximum.reduce(sizes), self._network)
        run = Run(times[:, 0].copy(), times[:, 1].copy(), _moved(schedule, times, costs))
        timeline = Timeline(schedule, costs, run, Engine(schedule, costs).run)
        self.profile.timelines.append(timeline)
        return timeline


# --- clocks and links ------------------------------------------------------------------------------


class _HostClock:
    """Of the host, in nanoseconds."""

    now = staticmethod(perf_counter_ns)

    def nanoseconds(self, marks: list[tuple[int, int]]) -> list[tuple[int, int]]:
        return marks


class _DeviceClock:
    """Events on a device's stream, told in the host's nanoseconds once they have all happened."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def nanoseconds(self, marks: list[tuple[torch.Event, torch.Event]]) -> list[tuple[int, int]]:
        last = self.now()
        last.synchronize()
        host = perf_counter_ns()
        return [
            (host - round(begin.elapsed_time(last) * 1e6), host - round(end.elapsed_time(last) * 1e6))
            for begin, end in marks
        ]


def _machine() -> int:
    """A number for this machine since it was started; processes with the same one read the same clock."""
    with contextlib.suppress(OSError):
        return zlib.crc32(Path("/proc/sys/kernel/random/boot_id").read_bytes())
    return -1


def _compared_clocks(links: Links | None, rank: int, ranks: int) -> Clocks:
    """Rank 0 asks every other rank for the time, again and again; the fastest answer counts."""
    if links is None:
        return Clocks((0.0,), (0.0,))
    found = np.zeros((ranks, 2), dtype=np.int64)
    token = torch.zeros(2, dtype=torch.int64)
    for other in range(1, ranks):
        if rank == other:
            for _ in range(_ROUNDS):
                links.receive_host(token, 0, links.control_tag(_CLOCK)).wait()
                token[0], token[1] = perf_counter_ns(), _machine()
                links.send_host(token, 0, links.control_tag(_CLOCK)).wait()
        elif rank == 0:
            found[other] = _asked(links, other, token)
    offsets = _all_gathered(links, found, [ranks] * ranks)[0] / 1e9
    return Clocks(tuple(offsets[:, 0].tolist()), tuple(offsets[:, 1].tolist()))


def _asked(links: Links, other: int, token: torch.Tensor) -> tuple[int, int]:
    answers, tag = [], links.control_tag(_CLOCK)
    for _ in range(_ROUNDS):
        begin = perf_counter_ns()
        links.send_host(token, other, tag).wait()
        links.receive_host(token, other, tag).wait()
        end = perf_counter_ns()
        answers.append((end - begin, int(token[0]) - (begin + end) // 2))
    if int(token[1]) == _machine() != -1:
        return 0, 0
    taken, offset = min(answers)
    return offset, taken // 2


def _measured_links(links: Links | None, schedule: Schedule, rank: int) -> LinkCosts:
    """Latency and bandwidth of each edge, by small and large messages there and back, edge after edge."""
    hosts, edges = schedule.placement.stage_to_rank, schedule.num_stages - 1
    found = np.zeros((edges, 2), dtype=np.int64)
    for edge in range(edges):
        here, there = hosts[edge], hosts[edge + 1]
        if links is not None and here != there and rank in (here, there):
            small, large = (_there_and_back(links, edge, hosts, rank, size) for size in (64, _LARGE))
            found[edge] = small // 2, max(large - small, 1) // 2
    taken = np.maximum.reduce(_all_gathered(links, found, [edges] * schedule.num_ranks))
    bandwidth = [_LARGE / (seconds / 1e9) if seconds else None for seconds in taken[:, 1].tolist()]
    return LinkCosts(tuple((taken[:, 0] / 1e9).tolist()), tuple(bandwidth))


def _there_and_back(links: Links, edge: int, hosts: Sequence[int], rank: int, size: int) -> int:
    """Nanoseconds of the fastest of several rounds, on the channels of the edge themselves."""
    up, down = 2 * edge, 2 * edge + 1
    tags = [links.control_tag(_PING) + channel % 2 for channel in (up, down)]
    row = torch.zeros(size, dtype=torch.uint8, device=links.device)
    best = 1 << 62
    for _ in range(_ROUNDS):
        begin = perf_counter_ns()
        if rank == hosts[edge]:
            links.send(row, hosts[edge + 1], up, tags[0]).wait()
            links.receive(row, hosts[edge + 1], down, tags[1]).wait()
        else:
            links.receive(row, hosts[edge], up, tags[0]).wait()
            links.send(row, hosts[edge], down, tags[1]).wait()
        if links.device.type != "cpu":
            torch.accelerator.synchronize()
        best = min(best, perf_counter_ns() - begin)
    return best


def _all_gathered(links: Links | None, mine: Any, lengths: Sequence[int]) -> list[Any]:
    """Every rank's array of integers; `lengths` are those of the ranks."""
    if links is None:
        return [mine]
    padded = torch.zeros((max(lengths, default=0), *mine.shape[1:]), dtype=torch.int64)
    padded[: len(mine)] = torch.from_numpy(np.ascontiguousarray(mine))
    return [row[:length].numpy() for row, length in zip(links.all_gather(padded, len(lengths)), lengths)]


# --- from times to costs ---------------------------------------------------------------------------


def _sizes(wiring: Wiring) -> Any:
    """Per stage, as far as this rank knows: bytes of its output, and of the gradient of its input."""
    found = np.zeros((wiring.plan.schedule.num_stages, 2), dtype=np.int64)
    for (kind, stage), size in wiring.message_sizes().items():
        found[stage, int(kind is Kind.SEND_B)] = size
    return found


def _derived(schedule: Schedule, times: Floats, sizes: Any, network: LinkCosts) -> Costs:
    """The middle time of each kind of work on each stage, and what everything else adds to a step."""
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
    """Per stage; where it never ran by itself, the mean of the others, or what else is known."""
    known = [seconds for (k, _), seconds in middle.items() if k is kind]
    fallback = list(otherwise) or [0.0] * schedule.num_stages
    mean = statistics.fmean(known) if known else None
    return tuple(
        middle.get((kind, stage), fallback[stage] if mean is None else mean)
        for stage in range(schedule.num_stages)
    )


def _moved(schedule: Schedule, times: Floats, costs: Costs) -> Moved | None:
    """When messages left and arrived: after the latency and the bytes, at the latest when they were used."""
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
