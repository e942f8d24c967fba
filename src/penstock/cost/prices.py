"""Prices: seconds of every action and message of a schedule at given costs.

Both simulation engines, the bounds, the search and the planner take their seconds from here. Which fields of
`Costs` a kind takes are in the table of kinds (`penstock.ir.kinds`).

A compute action has seconds on two streams of its rank, compute and all-to-all (the dispatch and combine of
expert parallelism). The two alternate, layer by layer, each waiting for the other:

    one step          F, I, W or B by itself          compute + all-to-all
    overlapped pair   F beside I, or F beside B       the longest of
                                                        the compute of both
                                                        the all-to-all of both
                                                        compute + all-to-all of F, of I, or of the W in B

The pair is ideal in three ways: its parts alternate so finely that a stream never waits for the first or the
last layer, neither stream slows the other down, and the W of a layer waits for no all-to-all of other layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from penstock.cost.costs import Costs
from penstock.cost.effects import changed_bytes
from penstock.ir.encoding import Floats, Ints, SmallInts
from penstock.ir.graph import StageGraph
from penstock.ir.kinds import Kind, MemoryLine, Moment
from penstock.ir.messages import VALUES, Messages
from penstock.ir.table import ActionTable

ALL_TO_ALL = tuple(sorted({name for kind in Kind for name in kind.spec.all_to_all}))
"""The fields of `Costs` with seconds of the all-to-all stream."""


class StreamSeconds(NamedTuple):
    """Seconds of actions on the two streams of a rank, without launch overhead."""

    compute: Floats
    all_to_all: Floats
    longest: Floats
    """Compute and all-to-all of F, of I or of W, in B the longer of the two: what a pair takes at least."""

    @property
    def alone(self) -> Floats:
        """Seconds of each action as a step by itself."""
        seconds: Floats = self.compute + self.all_to_all
        return seconds

    def of(self, kind: int | Ints | SmallInts, stage: int | slice | Ints | list[int]) -> StreamSeconds:
        """Those of chosen kinds, by number, and stages."""
        return StreamSeconds(*(seconds[kind, stage] for seconds in self))


def stream_seconds(costs: Costs, num_stages: int) -> StreamSeconds:
    """Per kind and stage; 0 for messages."""
    compute, all_to_all = np.zeros((len(Kind), num_stages)), np.zeros((len(Kind), num_stages))
    for kind in Kind:
        if kind.spec.cost is not None and kind is not Kind.OVERLAP_F_B:
            compute[kind.number] = costs.resolved(kind.spec.cost, num_stages)
        for name in kind.spec.all_to_all:
            all_to_all[kind.number] += costs.per_stage(name, num_stages)
    i, w, b = Kind.I.number, Kind.W.number, Kind.B.number
    longest, halves = compute + all_to_all, compute[i] + compute[w]
    # a B that is not as long as I and W together is divided as they are
    share = np.divide(compute[i], halves, out=np.full(num_stages, 0.5), where=halves > 0)
    longest[b] = np.maximum(share * compute[b] + all_to_all[i], (1 - share) * compute[b] + all_to_all[w])
    return StreamSeconds(compute, all_to_all, longest)


def action_seconds(costs: Costs, num_stages: int) -> Floats:
    """Per kind and stage: seconds of the action by itself, without launch overhead; 0 for messages."""
    return stream_seconds(costs, num_stages).alone


def pair_seconds(costs: Costs, first: StreamSeconds, second: StreamSeconds) -> Floats:
    """Seconds of overlapped pairs with these parts."""
    if costs.overlap is not None:
        return np.full_like(first.compute + second.compute, costs.overlap)
    longer = np.maximum(first.compute, second.compute)
    compute = longer + costs.overlap_factor * (first.compute + second.compute - longer)
    streams = np.maximum(compute, first.all_to_all + second.all_to_all)
    pairs: Floats = np.maximum(streams, np.maximum(first.longest, second.longest))
    return pairs


def pairs_can_pay(costs: Costs) -> bool:
    """Whether an overlapped pair can take less time than its two parts, apart from one launch less."""
    return _any_seconds(costs, ALL_TO_ALL) or costs.overlap is not None or costs.overlap_factor < 1


def step_seconds(table: ActionTable, costs: Costs) -> Floats:
    """Per slot: seconds, with the launch overhead of compute and overlapped pairs as one step."""
    streams = stream_seconds(costs, table.placement.num_stages)
    total: Floats = streams.alone.ravel()[table.kind * np.int64(table.placement.num_stages) + table.stage]
    if table.has(Kind.OFFLOAD, Kind.RELOAD):
        total += host_copy_seconds(table, costs)
    if table.has_pairs:
        second = np.flatnonzero(table.slot[1:] == table.slot[:-1]) + 1
        first, last = (streams.of(table.kind[at], table.stage[at]) for at in (second - 1, second))
        total = np.delete(total, second)
        total[table.slot[second]] = pair_seconds(costs, first, last)
    if costs.launch_overhead:
        total[table.is_compute_slot] += costs.launch_overhead
    return total


def host_copy_bytes(table: ActionTable, costs: Costs) -> Floats:
    """Per part: bytes that an OFFLOAD or RELOAD moves; 0 for others."""
    moved = np.zeros(len(table.code))
    for kind, moment in ((Kind.OFFLOAD, Moment.END), (Kind.RELOAD, Moment.START)):
        if table.has(kind):
            changed, change = changed_bytes(table, costs, MemoryLine.ACTIVATIONS, moment)
            is_copy = table.of_kind(kind)[changed]
            moved[changed[is_copy]] = np.abs(change[is_copy])
    return moved


def host_copy_seconds(table: ActionTable, costs: Costs) -> Floats:
    """Per part: seconds that an OFFLOAD or RELOAD occupies its direction of the host link; 0 for others."""
    seconds, parts = np.zeros(len(table.code)), np.flatnonzero(table.of_kind(Kind.OFFLOAD, Kind.RELOAD))
    if not parts.size:
        return seconds
    rank, ranks = table.part_rank[parts], table.placement.num_ranks
    seconds[parts] = np.array(costs.per_rank("host_latency", ranks))[rank]
    if costs.host_bandwidth is not None:
        speed = np.array(costs.per_rank("host_bandwidth", ranks))
        seconds[parts] += host_copy_bytes(table, costs)[parts] / speed[rank]
    return seconds


def all_to_all_seconds(table: ActionTable, costs: Costs) -> Floats:
    """Per slot: seconds of the all-to-all stream, of both parts of a pair."""
    part = stream_seconds(costs, table.placement.num_stages).all_to_all[table.kind, table.stage]
    return np.bincount(table.slot, weights=part, minlength=len(table.rank)).astype(np.float64)


def exposed_all_to_all(table: ActionTable, costs: Costs) -> Floats:
    """Per slot: seconds in which only the all-to-all stream works."""
    if not _any_seconds(costs, ALL_TO_ALL):
        return np.zeros(len(table.rank))
    nothing: dict[str, Any] = dict.fromkeys(ALL_TO_ALL, 0)
    return step_seconds(table, costs) - step_seconds(table, replace(costs, **nothing))


class EdgePrices(NamedTuple):
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


def _message_prices(messages: Messages, costs: Costs) -> EdgePrices:
    """Per message: what it takes on its edge, in its direction."""
    forward, backward = (edge_prices(costs, messages.table.graph, value) for value in VALUES)
    edge, is_gradient = messages.edge, messages.is_gradient
    return EdgePrices(*(np.where(is_gradient, b[edge], f[edge]) for f, b in zip(forward, backward)))


def message_seconds(messages: Messages, costs: Costs) -> tuple[Floats, Floats]:
    """Per message: seconds that it occupies its channel, and its latency."""
    prices = _message_prices(messages, costs)
    return prices.transfer, prices.latency


def message_bytes(messages: Messages, costs: Costs) -> Floats:
    """Per message: its bytes."""
    return _message_prices(messages, costs).bytes


def collectives_take_time(costs: Costs) -> bool:
    """Whether UNSHARD, RESHARD or REDUCE_GRAD take any seconds."""
    return _any_seconds(costs, [kind.spec.cost for kind in Kind if kind.is_collective and kind.spec.cost])


def host_copies_take_time(costs: Costs) -> bool:
    """Whether OFFLOAD and RELOAD can take any seconds."""
    return costs.host_bandwidth is not None or _any_seconds(costs, ["host_latency"])


def _any_seconds(costs: Costs, names: Sequence[str]) -> bool:
    return any(bool(np.any(np.asarray(getattr(costs, name)) > 0)) for name in names)
