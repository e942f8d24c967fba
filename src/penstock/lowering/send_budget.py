"""A budget of sends: waits moved earlier, so that a rank never has more than so many sends pending.

    before    0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 ...                   three activations are pending
    budget 1  0SEND_F0 0F1 0WAIT_SEND_F0 0SEND_F1 0F2 0WAIT_SEND_F1 0SEND_F2 ...

Each rank is gone through in the order of its list. Before a send x that the budget has no room for, one pending
send is waited for, of message m, say. With ⇝ for "comes before in every execution" (along lists, from sends to
receives, and from receives to waits):

    x ⇝ RECV m      unsafe: the wait would never end
    RECV m ⇝ x      the wait costs nothing: its receive has been reached by then
    neither         safe, but the rank may stall

The first that costs nothing is taken, otherwise the first that is safe; with none there is no result.

Both questions are answered from positions that are found once for each rank r, before any of its waits moves:
for each send and receive n and some ranks q, the last position in the list of q that comes before n. They stay
right while waits of r move, although each move adds an arrow RECV m -> x and drops RECV m -> y, with y after x:

- *The dropped arrow* follows from the new one and the list of r, so everything that was ⇝ before still is.
- *A move that costs nothing* adds an arrow that was ⇝ already: it changes no answer.
- *x ⇝ RECV k*, asked at x. The arrows added so far end at x or before it on r. A way from x that uses one comes
  back to r at x or before it: a cycle, and unsafe moves, which close cycles, are never made.
- *RECV k ⇝ x*. Of the added arrows that a way to x uses, let RECV m -> z be the first. Up to RECV m it is a way
  without moves, and from z it may go along the list of r. So RECV k ⇝ x by the positions, or RECV k ⇝ RECV m by
  the positions for the RECV m of an earlier move that may stall: the later of both positions is kept.

An answer about the ranks of r and of its receivers is all that r needs: two or three numbers per message.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Any, ClassVar, NamedTuple

import numpy as np

from penstock.arguments import plural, some
from penstock.errors import ScheduleError
from penstock.ir.encoding import Floats, Ints
from penstock.ir.messages import Messages
from penstock.ir.schedule import Schedule
from penstock.ir.table import step_of_slot
from penstock.loops import Loop
from penstock.lowering.passes import Pass
from penstock.validation import SendModel, invalid_schedule_error, validate
from penstock.validation.violation import slot_at

# ruff: noqa: ANN401, C901, PLR0912 -- loops over lists or arrays, in which calls would take most of the time

_ROUNDING = 1e-9


@dataclass(frozen=True)
class SendBudget(Pass):
    """Move waits for sends earlier, so that at most so many `messages`, or `bytes`, of a rank are pending.

    A message takes `activation_message` or `gradient_message` bytes, a number or one for each edge, as in
    `Costs`. A wait moves to where its receive has been reached anyway, if there is one.
    """

    messages: int | None = None
    bytes: float | None = None
    activation_message: float | tuple[float, ...] = 0
    gradient_message: float | tuple[float, ...] = 0
    name: ClassVar[str] = "send-budget"

    def __post_init__(self) -> None:
        if (self.messages is None) == (self.bytes is None):
            raise ScheduleError(f"{self.name}: give one of messages and bytes", parameter="send_budget")
        whole = type(self._limit) is int
        whole = whole or (self.bytes is not None and type(self._limit) is float)
        if not (whole and 0 <= self._limit < inf):
            kind = "number of bytes" if self.messages is None else "whole number"
            raise ScheduleError(
                f"{self.name}: the limit must be a {kind}, 0 or more (given {self._limit!r})",
                parameter="send_budget",
            )

    @property
    def _limit(self) -> float:
        limit = self.bytes if self.messages is None else self.messages
        return 0 if limit is None else limit

    def __call__(self, schedule: Schedule) -> Schedule:
        """The schedule with its waits moved; an error names a limit that can be met."""
        _require_waits(schedule, self.name)
        weight = self._weights(schedule.messages)
        placed = _place(schedule, weight, self._limit)
        if isinstance(placed, _Failure):
            raise self._error(schedule, placed, _smallest(schedule, weight, placed.needed))
        return _moved(schedule, placed)

    def _weights(self, messages: Messages) -> Floats:
        if self.messages is not None:
            return np.ones(len(messages.edge))
        edges = len(messages.table.graph.edges)
        sizes = []
        for name in ("activation_message", "gradient_message"):
            size = np.asarray(getattr(self, name), dtype=np.float64)
            if size.shape not in ((), (edges,)):
                raise ScheduleError(
                    f"{self.name}: {name} has {plural(size.size, 'number')}, "
                    f"but the schedule has {plural(edges, 'edge')}"
                )
            sizes.append(np.broadcast_to(size, edges)[messages.edge])
        return np.where(messages.is_gradient, sizes[1], sizes[0])

    def _error(self, schedule: Schedule, failure: _Failure, smallest: float) -> ScheduleError:
        table = schedule.table
        rank, step, send = slot_at(table, int(table.slot[failure.send]))
        pending = [str(step_of_slot(table, int(table.slot[part]))) for part in failure.pending]
        others = f", while {some(pending)} cannot end before it" if pending else ""
        limit, met = plural(self._limit, "pending send"), f"the smallest limit is {smallest:g}"
        if self.messages is None:
            limit, met = f"{self._limit:g} bytes of pending sends", f"{smallest:g} can be met"
        return ScheduleError(
            f"{self.name}: rank {rank} cannot keep to {limit}: at step {step}, {send} is one too many{others}; "
            f"{met}",
            parameter="send_budget",
        )


def smallest_send_budget(schedule: Schedule) -> int:
    """The fewest pending sends of a rank that `SendBudget` can keep to."""
    _require_waits(schedule, SendBudget.name)
    return int(_smallest(schedule, np.ones(len(schedule.messages.edge)), 0))


def _smallest(schedule: Schedule, weight: Floats, limit: float) -> float:
    while isinstance(placed := _place(schedule, weight, limit), _Failure):
        limit = placed.needed
    return limit


def _require_waits(schedule: Schedule, name: str) -> None:
    """Raise unless every message is sent, received and waited for."""
    messages = schedule.messages
    sent, waited = messages.send >= 0, messages.send_wait > messages.send
    if not waited.any() and (len(schedule.table.crossings[0]) or sent.any()):
        raise ScheduleError(f"{name}: the schedule has no waits for sends; run add-send-waits first")
    if not (sent == (messages.paired & waited)).all():
        raise invalid_schedule_error(schedule, validate(schedule, SendModel.EDGE_STREAMS))


class _Failure(NamedTuple):
    """A send that cannot be made room for."""

    send: int
    """Its part, like the others."""
    pending: list[int]
    needed: float
    """The limit that has room for it."""


class _Moves(NamedTuple):
    """Waits, as parts, in the order in which they move, and the sends that they move before."""

    wait: Ints
    before: Ints


def _moved(schedule: Schedule, moves: _Moves) -> Schedule:
    """The schedule with these waits directly before these sends."""
    table = schedule.table
    count = len(table.code)
    place, turn = np.arange(count), np.full(count, count)
    place[moves.wait], turn[moves.wait] = moves.before, np.arange(len(moves.wait))
    return schedule.with_codes(table.code[np.lexsort((turn, place))], table.part_bounds)


def _place(schedule: Schedule, weight: Floats, limit: float) -> _Moves | _Failure:
    """Which waits move before which sends, so that at most `limit` of the weights is pending on each rank."""
    messages, limit = schedule.messages, limit * (1 + _ROUNDING)
    sent = np.argsort(messages.send)[np.count_nonzero(messages.send < 0) :]
    count = len(sent)
    weight, target = weight[sent], messages.target[sent]
    # sends, receives and waits have numbers in the order of the sends: n, n + count and n + 2 * count
    part = np.concatenate([each[sent] for each in (messages.send, messages.receive, messages.send_wait)])
    at = np.argsort(part).astype(np.int32)
    bounds = np.searchsorted(part[at], schedule.table.part_bounds)
    position = np.empty_like(at)
    position[at] = np.arange(len(at))
    change = np.concatenate((weight, np.zeros(count), -weight))
    before, turn = np.full(count, -1, dtype=np.int32), np.zeros(count, dtype=np.int32)
    for rank, (first, stop) in enumerate(pairwise(bounds.tolist())):
        own = at[first:stop].copy()
        if not (np.cumsum(change[own]) > limit).any():
            continue
        others = np.unique(target[own[own < count]])
        columns = np.full(schedule.num_ranks, -1)
        columns[[rank, *others.tolist()]] = np.arange(1 + len(others))
        clock = _clocks(at, bounds, columns, count)
        if clock is None:
            raise invalid_schedule_error(schedule, validate(schedule, SendModel.EDGE_STREAMS))
        following, preceding = np.full((2, count + 1), count, dtype=np.int32)
        failed, needed = np.full(1, -1), np.zeros(1)
        sizes = np.array([count, first, 1 + len(others)])
        _MOVES.run(
            len(own),
            (own, sizes, np.array([limit]), weight, columns[target], position, clock),
            (before, turn, at[first:stop], following, preceding, failed, needed),
        )
        if failed[0] >= 0:
            pending = part[_chain(following.tolist(), count)].tolist()
            return _Failure(int(part[failed[0]]), pending, float(needed[0]))
        position[at[first:stop]] = np.arange(first, stop)
    moved = np.flatnonzero(before >= 0)
    moved = moved[np.argsort(turn[moved], kind="stable")]
    return _Moves(part[2 * count + moved], part[before[moved]])


def _chain(following: list[int], end: int) -> list[int]:
    """The pending sends, from the list that begins and ends at `end`."""
    found = [following[end]]
    while found[-1] != end:
        found.append(following[found[-1]])
    return found[:-1]


def _clocks(at: Any, bounds: Ints, columns: Ints, count: int) -> Any:
    """Per send and receive, for each rank with a column: its last position before it; None in a deadlock."""
    ranks, width = len(columns), int(columns.max()) + 1
    clock, known = (np.full(rows * width, -1, dtype=np.int32) for rows in (2 * count, ranks))
    waiting, reached = np.full(2 * count, -1, dtype=np.int32), np.zeros(1, dtype=np.int64)
    _CLOCKS.run(
        len(at) * width,
        (at, bounds[1:], columns, np.array([count, width])),
        (clock, known, bounds[:-1].copy(), np.arange(ranks), waiting, reached),
    )
    return clock if reached[0] == len(at) else None


def _follow(
    at: Any,
    stops: Any,
    columns: Any,
    shape: Any,
    clock: Any,
    known: Any,
    position: Any,
    ready: Any,
    waiting: Any,
    reached: Any,
) -> None:
    """Run all lists; a receive continues after its send, a wait after its receive, `count` numbers earlier."""
    count, width = shape[0], shape[1]
    top, done = len(ready), 0
    while top > 0:
        top -= 1
        rank = ready[top]
        own, column = rank * width, columns[rank]
        i, stop = position[rank], stops[rank]
        while i < stop:
            node = at[i]
            needed = node - count
            if needed >= 0:
                if waiting[needed] != -2:
                    waiting[needed] = rank
                    break
                for c in range(width):
                    known[own + c] = max(known[own + c], clock[needed * width + c])
            if column >= 0:
                known[own + column] = i
            if node < 2 * count:
                for c in range(width):
                    clock[node * width + c] = known[own + c]
                if waiting[node] >= 0:
                    ready[top] = waiting[node]
                    top += 1
                waiting[node] = -2
            i += 1
            done += 1
        position[rank] = i
    reached[0] = done


_CLOCKS = Loop(_follow)


def _move(
    own: Any,
    shape: Any,
    limit: Any,
    weight: Any,
    column_of: Any,
    position: Any,
    clock: Any,
    before: Any,
    turn: Any,
    out: Any,
    following: Any,
    preceding: Any,
    failed: Any,
    needed: Any,
) -> None:
    """Go through one list; pending sends are a linked list in their order, which begins and ends at `count`."""
    count, first, width = shape[0], shape[1], shape[2]
    stalled = [-1] * width
    pending, turns, n = 0.0, 0, 0
    for i in range(len(own)):
        node = own[i]
        if node >= 2 * count:
            message = node - 2 * count
            if before[message] >= 0:
                continue
        elif node < count:
            while pending + weight[node] > limit[0]:
                chosen, stalls = count, True
                message = following[count]
                while message != count and stalls:
                    receive = count + message
                    if clock[receive * width] < first + i:
                        column = column_of[message]
                        reached = max(clock[node * width + column], stalled[column])
                        stalls = reached < position[receive]
                        if chosen == count or not stalls:
                            chosen = message
                    message = following[message]
                if chosen == count:
                    failed[0], needed[0] = node, pending + weight[node]
                    return
                if stalls:
                    for c in range(width):
                        stalled[c] = max(stalled[c], clock[(count + chosen) * width + c])
                pending -= weight[chosen]
                following[preceding[chosen]] = following[chosen]
                preceding[following[chosen]] = preceding[chosen]
                before[chosen], turn[chosen] = node, turns
                turns += 1
                out[n] = 2 * count + chosen
                n += 1
            last = preceding[count]
            following[last], preceding[node] = node, last
            following[node], preceding[count] = count, node
            pending += weight[node]
        else:
            message = -1
        if node >= 2 * count:
            pending -= weight[message]
            following[preceding[message]] = following[message]
            preceding[following[message]] = preceding[message]
        out[n] = node
        n += 1


_MOVES = Loop(_move)
