"""The network engine: every rank's list, its messages, collectives and copies to the host, event by event.

The dataflow engine (`penstock.ir.dataflow`) knows steps that wait for steps. Here messages are events of their
own: posted by their send and their receive, queued in a stream, in transfer, arrived.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from penstock.ir.kinds import Kind
from penstock.ir.messages import Messages
from penstock.ir.table import ActionTable, Floats, Ints
from penstock.validation import SendModel

__all__ = ["Network", "RunTimes"]

_NOT_YET = -1.0


class _Role(IntEnum):
    """How the engine treats a step."""

    COMPUTE = 0
    SEND = 1
    RECEIVE = 2
    COLLECTIVE = 3
    UNSHARD = 4
    OFFLOAD = 5
    RELOAD = 6


_ROLES = {
    **dict.fromkeys((Kind.F, Kind.I, Kind.W, Kind.B, Kind.RECOMPUTE, Kind.OVERLAP_F_B), _Role.COMPUTE),
    **dict.fromkeys((Kind.SEND_F, Kind.SEND_B), _Role.SEND),
    **dict.fromkeys((Kind.RECV_F, Kind.RECV_B), _Role.RECEIVE),
    **dict.fromkeys((Kind.RESHARD, Kind.REDUCE_GRAD), _Role.COLLECTIVE),
    Kind.UNSHARD: _Role.UNSHARD,
    Kind.OFFLOAD: _Role.OFFLOAD,
    Kind.RELOAD: _Role.RELOAD,
}


@dataclass(frozen=True, eq=False)
class RunTimes:
    """When each slot started and ended; when each message (`penstock.ir.messages`) began and arrived.

    Where messages were not followed, `begin` and `arrival` are None; a message that does not exist has nan.
    """

    start: Floats
    end: Floats
    begin: Floats | None = None
    arrival: Floats | None = None
    stream_free: Mapping[int, float] = field(default_factory=dict)
    """When each stream of messages is free again; what a message takes after the last step counts here only."""


class Network:
    """A schedule prepared for the network engine, to be run once or many times."""

    def __init__(
        self,
        messages: Messages,
        transfer: Floats,
        latency: Floats,
        send_model: SendModel,
        *,
        blocking_receives: bool,
    ) -> None:
        """`transfer` and `latency` are per message: seconds on its channel, and until its arrival."""
        self.table = table = messages.table
        table.require_handled(_ROLES, "simulation.network")
        self.num_messages = len(messages.send)
        self.numbers = there = np.flatnonzero(messages.paired)
        self.send, self.receive = table.slot[messages.send[there]], table.slot[messages.receive[there]]
        self.transfer, self.latency = transfer[there].tolist(), latency[there].tolist()
        self.buffered, self.sends_block = send_model.is_buffered, send_model.blocks_rank
        self.receives_block = blocking_receives or send_model.blocks_rank
        # a slot is of one kind; the first part represents an overlapped pair
        first = np.concatenate(([True], table.slot[1:] != table.slot[:-1]))[: len(table.slot)]
        roles = np.array([_ROLES.get(kind, -1) for kind in Kind])
        self.role = roles[table.kind[first]].tolist()
        self.stage = table.stage[first].tolist()
        second = np.flatnonzero(~first)
        self.second_stage = dict(zip(table.slot[second].tolist(), table.stage[second].tolist()))
        self.message_of = np.full(len(table.rank), -1)
        self.message_of[self.send] = self.message_of[self.receive] = np.arange(len(there))
        self.needs = _needs(table, messages, there)
        self.copies: dict[int, list[int]] = {}
        for copy, waiting in zip(*(slots.tolist() for slots in table.host_copy_waits)):
            self.copies.setdefault(waiting, []).append(copy)
        streams = send_model.streams(messages.source[there], messages.target[there], table.placement.num_ranks)
        self.streams = list(zip(*(stream.tolist() for stream in streams)))
        self.behind, self.ahead = _queues(np.concatenate((self.send, self.receive)), np.concatenate(streams))

    def run(
        self, starts: Sequence[float], durations: Sequence[float], stream_free: Mapping[int, float]
    ) -> RunTimes:
        """One iteration, from these clocks of the ranks on, with streams that may still be busy."""
        return _Run(self, starts, durations, stream_free).run()


def _needs(table: ActionTable, messages: Messages, there: Ints) -> dict[int, list[int]]:
    """The messages that each slot waits for."""
    found: dict[int, list[int]] = {}
    for message, slot in enumerate(table.slots_of(messages.consumer[there]).tolist()):
        if slot >= 0:
            found.setdefault(slot, []).append(message)
    return found


def _queues(slot: Ints, stream: Ints) -> tuple[list[list[int]], list[int]]:
    """Per message: those directly behind it in its streams, and how many are directly ahead of it."""
    number = len(slot) // 2
    order = np.lexsort((slot, stream))
    adjacent = np.flatnonzero(stream[order][1:] == stream[order][:-1])
    behind: list[list[int]] = [[] for _ in range(number)]
    ahead = [0] * number
    for first, then in zip((order[adjacent] % number).tolist(), (order[adjacent + 1] % number).tolist()):
        behind[first].append(then)
        ahead[then] += 1
    return behind, ahead


class _Run:
    """One run in progress."""

    def __init__(
        self,
        network: Network,
        starts: Sequence[float],
        durations: Sequence[float],
        stream_free: Mapping[int, float],
    ) -> None:
        self.network, self.durations = network, durations
        self.clock = list(starts)
        # the other streams of each rank: collectives, and the host link in each direction
        self.streams = {role: list(starts) for role in (_Role.COLLECTIVE, _Role.OFFLOAD, _Role.RELOAD)}
        self.streams[_Role.UNSHARD] = self.streams[_Role.COLLECTIVE]
        self.position = network.table.slot_bounds[:-1].tolist()
        n, m = len(network.role), len(network.transfer)
        self.start, self.end = [_NOT_YET] * n, [_NOT_YET] * n
        self.begin, self.arrival = [_NOT_YET] * m, [_NOT_YET] * m
        self.posted = [0.0] * m
        # what a message still waits for: its two ends, and those ahead of it in its streams
        self.open = [(1 if network.buffered else 2) + ahead for ahead in network.ahead]
        self.stream_free = dict(stream_free)
        self.unsharded: dict[int, float] = {}
        self.waiting: dict[int, list[int]] = {}
        self.ready = list(range(len(self.clock)))

    def run(self) -> RunTimes:
        network = self.network
        while self.ready:
            rank = self.ready.pop()
            stop = int(network.table.slot_bounds[rank + 1])
            while self.position[rank] < stop and self._step(rank, self.position[rank]):
                self.position[rank] += 1
        times = np.full((2, network.num_messages), np.nan)
        times[:, network.numbers] = self.begin, self.arrival
        return RunTimes(np.array(self.start), np.array(self.end), times[0], times[1], self.stream_free)

    def _step(self, rank: int, i: int) -> bool:
        """Take a step; False if it has to wait."""
        role = self.network.role[i]
        if role == _Role.COMPUTE:
            return self._compute(rank, i)
        if role in (_Role.SEND, _Role.RECEIVE):
            return self._communicate(rank, i, sends=role == _Role.SEND)
        free = self.streams[role]
        self.start[i] = self._after_copies(i, max(self.clock[rank], free[rank]))
        self.end[i] = free[rank] = self.start[i] + self.durations[i]
        if role == _Role.UNSHARD:
            self.unsharded[self.network.stage[i]] = self.end[i]
        return True

    def _after_copies(self, i: int, now: float) -> float:
        """When the copies to or from the host that a step waits for have ended; they precede it in its list."""
        return max([now, *(self.end[copy] for copy in self.network.copies.get(i, ()))])

    def _communicate(self, rank: int, i: int, *, sends: bool) -> bool:
        network = self.network
        message = int(network.message_of[i])
        if self.start[i] == _NOT_YET:
            self.start[i] = self.clock[rank]
            if sends or not network.buffered:
                self.posted[message] = max(self.posted[message], self.clock[rank])
                self._advance(message)
        if network.sends_block if sends else network.receives_block:
            if self.arrival[message] == _NOT_YET:
                self.waiting.setdefault(message, []).append(rank)
                return False
            self.clock[rank] = max(self.clock[rank], self.arrival[message])
        self.end[i] = self.clock[rank]
        return True

    def _compute(self, rank: int, i: int) -> bool:
        network, now = self.network, self.clock[rank]
        for message in network.needs.get(i, ()):
            arrival = self.arrival[message]
            if arrival == _NOT_YET:
                self.waiting.setdefault(message, []).append(rank)
                return False
            now = max(now, arrival)
        now = max(now, self.unsharded.get(network.stage[i], now))
        if i in network.second_stage:
            now = max(now, self.unsharded.get(network.second_stage[i], now))
        self.start[i] = now = self._after_copies(i, now)
        self.clock[rank] = self.end[i] = now + self.durations[i]
        return True

    def _advance(self, message: int) -> None:
        """One thing less to wait for; if it was the last, the message moves, and then those behind it can."""
        todo = [message]
        while todo:
            message = todo.pop()
            self.open[message] -= 1
            if self.open[message]:
                continue
            network = self.network
            out, into = network.streams[message]
            begin = max(self.posted[message], self.stream_free.get(out, 0.0), self.stream_free.get(into, 0.0))
            self.begin[message] = begin
            self.arrival[message] = begin + network.transfer[message] + network.latency[message]
            held = begin + network.transfer[message] if network.buffered else self.arrival[message]
            self.stream_free[out] = self.stream_free[into] = held
            self.ready += self.waiting.pop(message, ())
            todo += network.behind[message]
