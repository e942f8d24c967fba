"""Prices: seconds of every action and message of a schedule at given costs.

Both simulation engines, the bounds, the search and the planner take their seconds from here. Which field of
`Costs` a kind takes is in the table of kinds (`penstock.ir.kinds`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.cost.costs import Costs
from penstock.ir.graph import StageGraph
from penstock.ir.kinds import Kind
from penstock.ir.messages import VALUES, Messages
from penstock.ir.table import ActionTable, Floats

__all__ = [
    "EdgePrices",
    "action_seconds",
    "collectives_take_time",
    "edge_prices",
    "message_bytes",
    "message_seconds",
    "pair_seconds",
    "step_seconds",
]


def action_seconds(costs: Costs, num_stages: int) -> Floats:
    """Per kind and stage: seconds of the action by itself, without launch overhead; 0 for messages."""
    seconds = np.zeros((len(Kind), num_stages))
    for kind in Kind:
        if kind is Kind.B:
            seconds[kind.number] = costs.full_backward(num_stages)
        elif kind.spec.cost is not None and kind is not Kind.OVERLAP_F_B:
            seconds[kind.number] = costs.per_stage(kind.spec.cost, num_stages)
    return seconds


def pair_seconds(costs: Costs, first: Floats, second: Floats) -> Floats:
    """Seconds of overlapped pairs whose parts take so long by themselves."""
    if costs.overlap is not None:
        return np.full_like(first + second, costs.overlap)
    longer = np.maximum(first, second)
    pairs: Floats = longer + costs.overlap_factor * (first + second - longer)
    return pairs


def step_seconds(table: ActionTable, costs: Costs) -> Floats:
    """Per slot: seconds, with the launch overhead of compute and overlapped pairs as one step."""
    part = action_seconds(costs, table.placement.num_stages)[table.kind, table.stage]
    total: Floats = np.bincount(table.slot, weights=part, minlength=len(table.rank)).astype(np.float64)
    second = np.flatnonzero(table.slot[1:] == table.slot[:-1]) + 1
    if second.size:
        total[table.slot[second]] = pair_seconds(costs, part[second - 1], part[second])
    if costs.launch_overhead:
        compute = np.zeros(len(table.rank), dtype=np.bool_)
        compute[table.slot[table.is_compute]] = True
        total[compute] += costs.launch_overhead
    return total


@dataclass(frozen=True)
class EdgePrices:
    """Per edge of the stage graph, for one direction: what a message between two ranks takes."""

    bytes: Floats
    transfer: Floats
    """Seconds that the message occupies its channel: bytes / bandwidth, 0 without a bandwidth."""
    latency: Floats
    """Seconds from then until it has arrived."""

    @property
    def total(self) -> Floats:
        """Seconds from its send to its arrival on a free channel."""
        seconds: Floats = self.latency + self.transfer
        return seconds


def edge_prices(costs: Costs, graph: StageGraph, value: str) -> EdgePrices:
    """For an `activation` along each edge, or a `gradient` against it."""
    count = len(graph.edges)
    size = np.array(costs.per_edge(f"{value}_message", count), dtype=np.float64)
    latency = np.array(costs.per_edge("latency", count), dtype=np.float64)
    if costs.bandwidth is None:
        return EdgePrices(size, np.zeros(count), latency)
    return EdgePrices(size, size / np.array(costs.per_edge("bandwidth", count)), latency)


def message_seconds(messages: Messages, costs: Costs) -> tuple[Floats, Floats]:
    """Per message: seconds that it occupies its channel, and its latency."""
    by_value = [edge_prices(costs, messages.table.graph, value) for value in VALUES]
    forward, backward = by_value
    edge, is_gradient = messages.edge, messages.is_gradient
    transfer = np.where(is_gradient, backward.transfer[edge], forward.transfer[edge])
    return transfer, np.where(is_gradient, backward.latency[edge], forward.latency[edge])


def message_bytes(messages: Messages, costs: Costs) -> Floats:
    """Per message: its bytes."""
    sizes = [edge_prices(costs, messages.table.graph, value).bytes[messages.edge] for value in VALUES]
    return np.where(messages.is_gradient, sizes[1], sizes[0])


def collectives_take_time(costs: Costs) -> bool:
    """Whether UNSHARD, RESHARD or REDUCE_GRAD take any seconds."""
    names = (kind.spec.cost for kind in Kind if kind.is_collective)
    return any(bool(np.any(np.asarray(getattr(costs, name)) > 0)) for name in names if name is not None)
