"""Measures the latency and the bandwidth of every edge between stages, by round trips on its channels."""

from __future__ import annotations

from time import perf_counter_ns
from typing import NamedTuple

import numpy as np
import torch

from penstock.cost.costs import Costs
from penstock.ir.schedule import Schedule
from penstock.runtime.transport.buffer_pool import Buffer
from penstock.runtime.transport.communicator import Communicator, ControlMessage, gather_arrays
from penstock.runtime.transport.transport_errors import wait

__all__ = ["LinkCosts", "link_costs", "measure_links"]

_ROUNDS = 20
_SMALL, _LARGE = 64, 1 << 20  # bytes


class LinkCosts(NamedTuple):
    """Per edge between stages: seconds and bytes per second; 0 and None where the stages share a rank."""

    latency: tuple[float, ...]
    bandwidth: tuple[float | None, ...]


def link_costs(network: LinkCosts) -> Costs:
    """Costs of links alone; an edge between stages of one rank is as fast as the fastest link."""
    measured = [speed for speed in network.bandwidth if speed]
    bandwidth = tuple(speed or max(measured) for speed in network.bandwidth) if measured else None
    return Costs(latency=network.latency or 0.0, bandwidth=bandwidth)


def measure_links(communicator: Communicator | None, schedule: Schedule, rank: int) -> LinkCosts:
    """Latency and bandwidth of each edge, from small and large messages, one edge after the other."""
    hosts, edges = schedule.placement.stage_to_rank, schedule.graph.edges
    found = np.zeros((len(edges), 2), dtype=np.int64)
    for edge, ends in enumerate(edges):
        here, there = (hosts[stage] for stage in ends)
        if communicator is not None and here != there and rank in (here, there):
            channels = 2 * int(schedule.table.carrier[edge]), 2 * edge + 1
            small, large = (
                _round_trip(communicator, channels, there if rank == here else here, size, first=rank == here)
                for size in (_SMALL, _LARGE)
            )
            found[edge] = small // 2, max((large - small) // 2, 1)  # which may be noise
    taken = np.maximum.reduce(gather_arrays(communicator, found, [len(edges)] * schedule.num_ranks))
    bandwidth = [_LARGE / (seconds / 1e9) if seconds else None for seconds in taken[:, 1].tolist()]
    return LinkCosts(tuple((taken[:, 0] / 1e9).tolist()), tuple(bandwidth))


def _round_trip(
    communicator: Communicator, channels: tuple[int, int], peer: int, size: int, *, first: bool
) -> int:
    """Nanoseconds of the fastest of several round trips on the two channels of an edge."""
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
