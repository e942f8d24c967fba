"""Finds where in a schedule the sends and receives of flight records are: records become states of ranks.

A record has no names of actions. But a rank issues its messages in the order of its list, step after step, so
the last operations of the record (is it a send, to whom) fit only one place of the list:

    list     recv<-0  send->2  recv<-0  send->2  recv<-2  send->0  recv<-2  send->0
    record                     ... recv<-0  send->2  recv<-2           the first pending one: 1RECV_B0

Operations before the first step (torch exchanges shapes) fit no place; they have other tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from penstock.arguments import listed, plural
from penstock.errors import ScheduleError
from penstock.ir.action import Action
from penstock.ir.schedule import Schedule
from penstock.traces.flight_recorder import FlightRecord, Operation
from penstock.traces.message_orders import message_orders
from penstock.traces.rank_state import RankState

__all__ = ["AlignedRecords", "align_records"]

_MAX_TENSORS = 8  # of a message


class _Message(NamedTuple):
    """A SEND or RECV in the list of a rank; `peer` is a world rank."""

    position: int
    action: Action
    peer: int

    @property
    def code(self) -> int:
        return 2 * self.peer + self.action.kind.is_send


@dataclass(frozen=True)
class _Fit:
    """The place of a record's last operation in the messages of a list, each of which has `tensors` of them."""

    matched: int
    """How many operations at the end of the record fit."""
    at_start: bool
    """Whether the first of these is the first of a step."""
    last: int
    tensors: int

    @property
    def score(self) -> tuple[int, bool, int]:
        """Which of two fits is better."""
        return self.matched, self.at_start, -self.tensors


@dataclass(frozen=True)
class AlignedRecords:
    """The states of one pipeline's ranks; `differences` has those whose operations are not the schedule's."""

    states: tuple[RankState, ...]
    differences: Mapping[int, str]


def align_records(records: Sequence[FlightRecord], schedule: Schedule) -> list[AlignedRecords]:
    """The states of the ranks of each pipeline that the records are of."""
    return [
        _aligned([record for record in records if record.world_rank in members], members, schedule)
        for members in _pipelines(records, schedule.num_ranks)
    ]


def _pipelines(records: Sequence[FlightRecord], size: int) -> list[tuple[int, ...]]:
    """The world ranks of each pipeline: the groups of messages, or else the ranks that messages connect."""
    groups = {group for record in records for group in record.groups if len(group) == size}
    if groups:
        return sorted(groups)
    connected: list[set[int]] = []
    for record in records:
        own = {record.world_rank, *(operation.peer for operation in record.operations)}
        touched = [each for each in connected if each & own]
        connected = [each for each in connected if not each & own] + [own.union(*touched)]
    if bad := [ranks for ranks in connected if len(ranks) != size]:
        raise ScheduleError(
            f"the flight records have messages between world ranks {listed(sorted(bad[0]))}, and the schedule "
            f"has {plural(size, 'rank')}: give the schedule of this run as --schedule",
            argument="schedule",
        )
    return [tuple(sorted(ranks)) for ranks in connected]


def _aligned(records: Sequence[FlightRecord], members: tuple[int, ...], schedule: Schedule) -> AlignedRecords:
    """The states by the order of messages that fits best."""
    best: tuple[int, Schedule, dict[int, _Fit]] | None = None
    for order in message_orders(schedule):
        fits = {
            record.world_rank: _fit(record, _messages(order, members, members.index(record.world_rank)))
            for record in records
        }
        score = sum(fit.matched for fit in fits.values())
        if best is None or score > best[0]:
            best = score, order, fits
    assert best is not None, "every schedule has an order of messages"
    _, order, fits = best
    states, differences = [], {}
    for record in records:
        messages = _messages(order, members, members.index(record.world_rank))
        fit = fits[record.world_rank]
        if not record.operations:
            states.append(RankState(members, record.world_rank, order, runtime="flight recorder"))
        elif _is_complete(fit, record, messages):
            states.append(_state(record, messages, fit, members, order))
        else:
            states.append(RankState(members, record.world_rank, order, runtime="flight recorder"))
            differences[members.index(record.world_rank)] = _difference(record, messages)
    sources = {record.world_rank: record.source for record in records}
    named = [replace(state, source=sources[state.world_rank]) for state in states]
    return AlignedRecords(tuple(_same_steps(named, set(differences))), differences)


def _messages(schedule: Schedule, members: tuple[int, ...], rank: int) -> list[_Message]:
    hosts = schedule.placement.stage_to_rank
    return [
        _Message(position, part, members[hosts[part.other_end]])
        for position, step in enumerate(schedule.ranks[rank])
        for part in step.parts
        if part.kind.is_communication
    ]


def _code(operation: Operation) -> int:
    return 2 * operation.peer + operation.is_send


def _fit(record: FlightRecord, messages: Sequence[_Message]) -> _Fit:
    """The place where most operations at the end of the record fit the list, repeated step by step."""
    found = np.array([_code(operation) for operation in record.operations], dtype=np.int64)[::-1]
    best = _Fit(0, at_start=False, last=0, tensors=1)
    for tensors in range(1, _MAX_TENSORS + 1):
        pattern = np.repeat(np.array([message.code for message in messages], dtype=np.int64), tensors)
        if not len(pattern) or not len(found):
            break
        for last in range(len(pattern)):
            expected = pattern[(last - np.arange(len(found))) % len(pattern)]
            differs = np.flatnonzero(expected != found)
            matched = int(differs[0]) if len(differs) else len(found)
            fit = _Fit(matched, (last - matched + 1) % len(pattern) == 0, last, tensors)
            best = max(best, fit, key=lambda each: each.score)
        if best.matched == len(found):
            break
    return best


def _is_complete(fit: _Fit, record: FlightRecord, messages: Sequence[_Message]) -> bool:
    """Whether the fit is a proof: all operations, a whole step, or the beginning of the first step.

    Before that, there are only operations with other tensors.
    """
    whole_step = fit.matched >= len(messages) * fit.tensors
    if fit.matched == len(record.operations) or whole_step:
        return True
    split = len(record.operations) - fit.matched
    before, since = (
        {(_code(operation), operation.tensors) for operation in part}
        for part in (record.operations[:split], record.operations[split:])
    )
    return fit.at_start and fit.matched > 0 and not before & since


def _difference(record: FlightRecord, messages: Sequence[_Message]) -> str:
    """The first operation that is not the list's, counted from the beginning of the step that fits best."""
    pattern = [message.code for message in messages]
    codes = [_code(operation) for operation in record.operations]
    best, start = 0, 0
    for begin in range(len(codes)):
        pairs = zip(codes[begin:], pattern, strict=False)
        count = next((n for n, (one, other) in enumerate(pairs) if one != other), 0)
        if count >= best:
            best, start = count, begin
    expected = messages[min(best, len(messages) - 1)]
    found = record.operations[start + best] if start + best < len(codes) else "nothing"
    before = f"after {messages[best - 1].action}" if best else "at the start of a step"
    return f"{before} it issued a {found} in place of {expected.action}"


def _state(
    record: FlightRecord,
    messages: Sequence[_Message],
    fit: _Fit,
    members: tuple[int, ...],
    order: Schedule,
) -> RankState:
    """The state at the first pending operation, or after the last one if all are completed."""
    length = len(messages) * fit.tensors
    tail = record.operations[len(record.operations) - fit.matched :]
    first = fit.last - len(tail) + 1  # the number of the first of them, from the start of the current step
    pending = next((n for n, each in enumerate(tail) if each.state != "completed"), None)
    place = fit.last + 1 if pending is None else first + pending
    step = place // length if pending is not None else (place - 1) // length
    begin = step * length
    index = (place - begin) // fit.tensors
    steps = len(order.ranks[members.index(record.world_rank)])
    if pending is None:
        position = messages[index - 1].position + 1 if index < len(messages) else steps
        awaits = ""
    else:
        position, awaits = messages[index].position, str(messages[index].action)
    waiting_for = f"the collective {record.collective}" if record.collective and not awaits else ""
    return RankState(
        members,
        record.world_rank,
        order,
        position=position,
        awaits=awaits,
        waiting_for=waiting_for,
        messages=_tensors_by_action(tail, first - begin, messages, fit),
        runtime="flight recorder",
    )


def _tensors_by_action(
    operations: Sequence[Operation], first: int, messages: Sequence[_Message], fit: _Fit
) -> dict[str, tuple[str, ...]]:
    """The tensors of each action of a step; `first` is the number in the step of the first operation."""
    known: dict[str, list[str]] = {}
    for number, operation in enumerate(operations, first):
        if 0 <= number < len(messages) * fit.tensors:
            known.setdefault(str(messages[number // fit.tensors].action), []).extend(operation.tensors)
    return {name: tuple(tensors) for name, tensors in known.items()}


def _same_steps(states: Sequence[RankState], unknown: set[int]) -> list[RankState]:
    """The states with step numbers: what one rank has sent, its neighbour has received, or nearly."""
    found: dict[int, RankState] = {}
    left = [state for state in states if state.rank not in unknown]
    while left:
        state = left.pop(0)
        near = next((other for other in found.values() if _shared(state, other)), None)
        step = 0 if near is None else near.step + _step_offset(state, near)
        found[state.rank] = replace(state, step=step)
        left.sort(key=lambda each: not any(_shared(each, other) for other in found.values()))
    lowest = min((state.step for state in found.values()), default=0)
    numbers = {rank: state.step - lowest for rank, state in found.items()}
    return [
        replace(found[state.rank], step=numbers[state.rank], call=numbers[state.rank])
        if state.rank in found
        else state
        for state in states
    ]


def _passed(state: RankState) -> dict[tuple[int, int, bool], tuple[int, int]]:
    """Per channel (from rank, to rank, gradients): the messages passed in this step, and all of a step."""
    hosts = state.schedule.placement.stage_to_rank
    counts: dict[tuple[int, int, bool], tuple[int, int]] = {}
    for position, step in enumerate(state.schedule.ranks[state.rank]):
        for part in step.parts:
            if part.kind.is_communication:
                ends = hosts[part.stage], hosts[part.other_end]
                here, there = ends if part.kind.is_send else ends[::-1]
                key = here, there, part.kind.spec.value == "gradient"
                passed, total = counts.get(key, (0, 0))
                counts[key] = passed + (position < state.position), total + 1
    return counts


def _shared(one: RankState, other: RankState) -> set[tuple[int, int, bool]]:
    return _passed(one).keys() & _passed(other).keys()


def _step_offset(state: RankState, near: RankState) -> int:
    """How many steps a rank is ahead of its neighbour: -1, 0 or 1."""
    mine, theirs = _passed(state), _passed(near)

    def mismatch(offset: int) -> int:
        return sum(abs(mine[key][0] + offset * mine[key][1] - theirs[key][0]) for key in _shared(state, near))

    return min((0, -1, 1), key=mismatch)
