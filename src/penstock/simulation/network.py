"""The full walk: every rank's list, its messages and its collectives, step by step.

`replay` knows steps that wait for steps. Here messages have a life of their own: posted by their send and
their receive, queued in a stream, moving, arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.ir.action import Kind
from penstock.ir.table import ActionTable, Floats, Ints
from penstock.validation import MODELS
from penstock.validation.communication import Messages

__all__ = ["Moved", "Run", "Walk"]

_NOT_YET = -1.0
_COMPUTE, _SEND, _RECEIVE, _UNSHARD, _RESHARD, _REDUCE = range(6)
_WHAT = {
    Kind.SEND_F: _SEND,
    Kind.SEND_B: _SEND,
    Kind.RECV_F: _RECEIVE,
    Kind.RECV_B: _RECEIVE,
    Kind.UNSHARD: _UNSHARD,
    Kind.RESHARD: _RESHARD,
    Kind.REDUCE_GRAD: _REDUCE,
}
_WHAT_OF = np.array([_WHAT.get(kind, _COMPUTE) for kind in Kind])


@dataclass(frozen=True)
class Moved:
    """The messages of a run: the slots of their ends, and when they were posted, began and arrived."""

    send: Ints
    receive: Ints
    begin: Floats
    arrival: Floats


@dataclass(frozen=True)
class Run:
    """When each slot started and ended, and when each message moved, if messages were followed."""

    start: Floats
    end: Floats
    moved: Moved | None


class Walk:
    """The lists made ready to be walked, once or many times."""

    def __init__(
        self,
        table: ActionTable,
        taken: Floats,
        latency: Floats,
        messages: Messages,
        sends: str,
        *,
        blocking: bool,
    ) -> None:
        """`taken` and `latency` are per message: how long its channel takes the bytes, and the hop."""
        self.table = table
        there = np.flatnonzero(messages.paired)
        self.send, self.receive = table.slot[messages.send[there]], table.slot[messages.receive[there]]
        self.taken, self.latency = taken[there].tolist(), latency[there].tolist()
        self.buffered, self.holds_rank = sends == MODELS[0], sends == MODELS[-1]
        self.blocking = blocking or self.holds_rank
        # a slot is of one kind; the first part speaks for an overlapped pair
        first = np.concatenate(([True], table.slot[1:] != table.slot[:-1]))[: len(table.slot)]
        self.what = _WHAT_OF[table.kind[first]].tolist()
        self.stage = table.stage[first].tolist()
        self.message_of = np.full(len(table.rank), -1)
        self.message_of[self.send] = self.message_of[self.receive] = np.arange(len(there))
        self.needs: dict[int, list[int]] = {}
        consumer = table.slot_or_none[messages.consumer[there]]
        for message, slot in enumerate(consumer.tolist()):
            if slot >= 0:
                self.needs.setdefault(slot, []).append(message)
        second = np.flatnonzero(~first)
        self.second_stage = dict(zip(table.slot[second].tolist(), table.stage[second].tolist()))
        self._make_streams(messages.source[there], messages.target[there], sends)

    def _make_streams(self, source: Ints, target: Ints, sends: str) -> None:
        """Per message and end: the stream it queues in, and who is behind it there."""
        p = self.table.placement.num_ranks
        at_sender, at_receiver = source * p + target, source * p + target + p * p
        if sends == "pair-streams":
            at_sender, at_receiver = source * p + target, target * p + source
        elif sends in MODELS[3:]:
            at_sender, at_receiver = source, target
        self.streams = list(zip(at_sender.tolist(), at_receiver.tolist()))
        number = len(source)
        slot = np.concatenate((self.send, self.receive))
        stream = np.concatenate((at_sender, at_receiver))
        order = np.lexsort((slot, stream))
        behind = np.flatnonzero(stream[order][1:] == stream[order][:-1])
        self.behind: list[list[int]] = [[] for _ in range(number)]
        self.ahead = [0] * number
        for first, then in zip((order[behind] % number).tolist(), (order[behind + 1] % number).tolist()):
            self.behind[first].append(then)
            self.ahead[then] += 1

    def run(self, starts: Sequence[float], durations: Sequence[float]) -> Run:
        """One iteration, from these clocks of the ranks on."""
        return _Going(self, starts, durations).run()


class _Going:
    """One run in progress."""

    def __init__(self, walk: Walk, starts: Sequence[float], durations: Sequence[float]) -> None:
        self.walk, self.durations = walk, durations
        self.clock, self.collective = list(starts), list(starts)
        self.position = walk.table.slot_bounds[:-1].tolist()
        n, m = len(walk.what), len(walk.taken)
        self.start, self.end = [_NOT_YET] * n, [_NOT_YET] * n
        self.begin, self.arrival = [_NOT_YET] * m, [_NOT_YET] * m
        self.posted = [0.0] * m
        # what a message still waits for: its two ends, and those ahead of it in its streams
        self.open = [(1 if walk.buffered else 2) + ahead for ahead in walk.ahead]
        self.free: dict[int, float] = {}
        self.whole: dict[int, float] = {}
        self.waiting: dict[int, list[int]] = {}
        self.ready = list(range(len(self.clock)))

    def run(self) -> Run:
        walk = self.walk
        while self.ready:
            rank = self.ready.pop()
            stop = int(walk.table.slot_bounds[rank + 1])
            while self.position[rank] < stop and self._step(rank, self.position[rank]):
                self.position[rank] += 1
        moved = Moved(walk.send, walk.receive, np.array(self.begin), np.array(self.arrival))
        return Run(np.array(self.start), np.array(self.end), moved)

    def _step(self, rank: int, i: int) -> bool:
        """Take a step, or say that it has to wait."""
        walk, what = self.walk, self.walk.what[i]
        if what == _COMPUTE:
            return self._compute(rank, i)
        if what in (_SEND, _RECEIVE):
            message = int(walk.message_of[i])
            if self.start[i] == _NOT_YET:
                self.start[i] = self.clock[rank]
                self._post(message, self.clock[rank], counts=what == _SEND or not walk.buffered)
            holds = walk.holds_rank if what == _SEND else walk.blocking
            if holds:
                if self.arrival[message] == _NOT_YET:
                    self.waiting.setdefault(message, []).append(rank)
                    return False
                self.clock[rank] = max(self.clock[rank], self.arrival[message])
            self.end[i] = self.clock[rank]
            return True
        self.start[i] = max(self.clock[rank], self.collective[rank])
        self.end[i] = self.collective[rank] = self.start[i] + self.durations[i]
        if what == _UNSHARD:
            self.whole[walk.stage[i]] = self.end[i]
        return True

    def _compute(self, rank: int, i: int) -> bool:
        walk, now = self.walk, self.clock[rank]
        for message in walk.needs.get(i, ()):
            arrival = self.arrival[message]
            if arrival == _NOT_YET:
                self.waiting.setdefault(message, []).append(rank)
                return False
            now = max(now, arrival)
        now = max(now, self.whole.get(walk.stage[i], now))
        if i in walk.second_stage:
            now = max(now, self.whole.get(walk.second_stage[i], now))
        self.start[i] = now
        self.clock[rank] = self.end[i] = now + self.durations[i]
        return True

    def _post(self, message: int, now: float, *, counts: bool) -> None:
        if counts:
            self.posted[message] = max(self.posted[message], now)
            self._one_less(message)

    def _one_less(self, message: int) -> None:
        """One thing less to wait for; if it was the last, the message moves, and lets those behind it move."""
        todo = [message]
        while todo:
            message = todo.pop()
            self.open[message] -= 1
            if self.open[message]:
                continue
            walk = self.walk
            here, there = walk.streams[message]
            begin = max(self.posted[message], self.free.get(here, 0.0), self.free.get(there, 0.0))
            self.begin[message] = begin
            self.arrival[message] = begin + walk.taken[message] + walk.latency[message]
            held = begin + walk.taken[message] if walk.buffered else self.arrival[message]
            self.free[here] = self.free[there] = held
            self.ready += self.waiting.pop(message, ())
            todo += walk.behind[message]
