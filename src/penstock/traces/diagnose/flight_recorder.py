"""Dumps of torch's flight recorder: the sends and receives of a rank, aligned with its schedule."""

from __future__ import annotations

import io
import json
import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn

import numpy as np

from penstock.arguments import listed, plural, printable
from penstock.errors import FormatError, Parameter, ScheduleError
from penstock.ir.action import Action, Step
from penstock.ir.kinds import Kind
from penstock.ir.schedule import Schedule
from penstock.lowering import AddCommunication, lower
from penstock.traces.diagnose.rank_state import RankState, Wait, WaitKind

# Pickles of plain values only, with memory in proportion to the file.
#
# The unpickler knows no class and calls nothing: every other operation is refused before it runs. Python's
# unpickler in C allocates what a damaged pickle asks for, so the one in Python is the base. Keys of mappings
# are texts and numbers: the hash of nested tuples may take for ever.


_PLAIN = (
    "APPEND APPENDS BINFLOAT BINGET BININT BININT1 BININT2 BINPUT BINUNICODE EMPTY_DICT EMPTY_LIST EMPTY_TUPLE "
    "FRAME LONG1 LONG_BINGET LONG_BINPUT MARK MEMOIZE NEWFALSE NEWTRUE NONE PROTO SHORT_BINUNICODE STOP TUPLE "
    "TUPLE1 TUPLE2 TUPLE3"
)


class PickleRefusedError(Exception):
    """A pickle has an operation or a key that it may not have."""


class _Operations(dict[int, Callable[[Any], None]]):
    """The allowed operations by their code."""

    def __missing__(self, code: int) -> NoReturn:
        raise PickleRefusedError(f"operation {chr(code)!r} is not allowed")


class _PlainUnpickler(pickle._Unpickler):  # noqa: SLF001 -- the one in C has no limits
    stack: list[Any]

    def _set_items(self) -> None:
        items = self.pop_mark()  # type: ignore[attr-defined]
        for key, value in zip(items[::2], items[1::2], strict=True):
            self._set(key, value)

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set(key, value)

    def _set(self, key: object, value: object) -> None:
        target = self.stack[-1]
        if type(target) is not dict or not isinstance(key, str | int) or key in target:
            raise PickleRefusedError("a mapping is not one of a valid file")
        target[key] = value

    dispatch = _Operations(
        {code: pickle._Unpickler.dispatch[code] for code in (getattr(pickle, n)[0] for n in _PLAIN.split())}  # noqa: SLF001
        | {pickle.SETITEM[0]: _set_item, pickle.SETITEMS[0]: _set_items}
    )


def unpickle_plain(content: bytes) -> object:
    """Return the plain value of a pickle; raise `PickleRefusedError` for everything else, and run nothing."""
    file = io.BytesIO(content)
    try:
        value: object = _PlainUnpickler(file).load()
    except PickleRefusedError:
        raise
    except Exception as error:  # noqa: BLE001 -- damaged content can raise anything
        raise PickleRefusedError(f"it is damaged ({type(error).__name__})") from None
    if file.tell() != len(content):
        raise PickleRefusedError("there is more after the end of the pickle")
    return value


# A dump of torch's flight recorder: the sends and receives of one rank, from JSON or from a pickle.
#
# torch writes a dump per rank when NCCL times out (`TORCH_NCCL_DUMP_ON_TIMEOUT`) or on request. It has the last
# operations of the rank (`TORCH_FR_BUFFER_SIZE`), each with a name such as `nccl:send 0->1` (ranks of its
# process group), a state (scheduled, started, completed) and the sizes of its tensors. Fields that are not
# needed are not looked at.


_NAME = re.compile(r"\w+:(?:(send) (\d{1,8})->(\d{1,8})|(recv) (\d{1,8})<-(\d{1,8})|[\w ]+)", re.ASCII)
_STATES = ("scheduled", "started", "completed")
_DEEPEST = 16  # dimensions of a tensor
_MAX_PROBLEMS = 100


@dataclass(frozen=True)
class Operation:
    """One send or receive; ranks are world ranks."""

    is_send: bool
    peer: int
    state: str
    """`scheduled`, `started` or `completed`."""
    tensors: tuple[str, ...]
    """Such as `Float [2, 8]`."""

    @property
    def code(self) -> int:
        """A number for the peer and the direction."""
        return 2 * self.peer + self.is_send

    def __str__(self) -> str:
        return f"send to rank {self.peer}" if self.is_send else f"receive from rank {self.peer}"


@dataclass(frozen=True)
class FlightRecord:
    """The operations of one rank, in the order in which they were issued."""

    world_rank: int
    operations: tuple[Operation, ...]
    collective: str
    """The name of the first collective that is not completed; empty if there is none."""
    groups: tuple[tuple[int, ...], ...] = ()
    """The process groups of its sends and receives."""
    source: str = ""


def is_flight_record(document: object) -> bool:
    """Whether this is a dump rather than some other file."""
    return isinstance(document, Mapping) and "version" in document and "pg_config" in document


def load_flight_record(document: Mapping[str, Any], world_rank: int, source: str) -> FlightRecord:
    """The record in a parsed dump; `source` names it in error messages."""
    reader = _Reader(world_rank)
    version = document.get("version")
    if not isinstance(version, str) or not version.startswith("2."):
        reader.problems.append(f"version {_shown(version)} is unknown; versions 2.x are read")
    reader.read_groups(document.get("pg_config"))
    entries = document.get("entries", [])
    if not isinstance(entries, list):
        reader.problems.append("entries: expected a list of operations")
        entries = []
    for index, entry in enumerate(entries):
        if len(reader.problems) < _MAX_PROBLEMS:
            reader.read_entry(entry, f"entries[{index}]")
    if reader.problems:
        raise FormatError(source, reader.problems)
    groups = tuple(sorted(reader.used_groups))
    return FlightRecord(world_rank, tuple(reader.operations), reader.collective, groups, source)


class _Reader:
    """Reads the entries of one dump; `problems` has a sentence for each error."""

    def __init__(self, world_rank: int) -> None:
        self.problems: list[str] = []
        self.operations: list[Operation] = []
        self.collective = ""
        self.used_groups: set[tuple[int, ...]] = set()
        self._world_rank = world_rank
        self._groups: dict[str, list[int]] = {}
        self._launches: list[tuple[str, object]] = []
        """The process group and the number of the launch of each operation."""

    def read_groups(self, config: object) -> None:
        if not isinstance(config, dict):
            self.problems.append("pg_config: expected an object with the process groups")
            return
        for name, group in config.items():
            ranks = group.get("ranks") if isinstance(group, dict) else None
            try:
                found = json.loads(ranks) if isinstance(ranks, str) else ranks
            except (ValueError, RecursionError):
                found = None
            if isinstance(found, list) and all(type(rank) is int and rank >= 0 for rank in found):
                self._groups[str(name)] = sorted(found)
            else:
                self.problems.append(f"pg_config: group {_shown(name)} has no list of ranks")

    def read_entry(self, entry: object, where: str) -> None:
        """Read one entry, which is a send, a receive, or something else that may be pending."""
        if not isinstance(entry, dict):
            self.problems.append(f"{where}: expected an object")
            return
        name, state = entry.get("profiling_name"), entry.get("state")
        match = _NAME.fullmatch(name) if isinstance(name, str) else None
        if match is None:
            self.problems.append(f"{where}: {_shown(name)} is not an operation such as nccl:send 0->1")
        if state not in _STATES:
            self.problems.append(f"{where}: state {_shown(state)} is not one of {', '.join(_STATES)}")
        if match is None or self.problems:
            return
        group = entry.get("process_group")
        launch = str(group[0]) if isinstance(group, list | tuple) and group else "", entry.get("p2p_seq_id")
        if match[1] or match[4]:
            self._read_message(entry, match, launch, where)
        elif "coalesced" in match[0]:
            self._complete(launch, str(state))
        elif state != "completed" and not self.collective:
            self.collective = match[0].partition(":")[2]

    def _read_message(
        self, entry: dict[str, Any], match: re.Match[str], launch: tuple[str, object], where: str
    ) -> None:
        is_send = match[1] is not None
        own, peer = map(int, match.group(2, 3) if is_send else match.group(5, 6))
        ranks = self._groups.get(launch[0], [])
        if max(own, peer) >= len(ranks):
            self.problems.append(f"{where}: process group {_shown(launch[0])} has no ranks {own} and {peer}")
            return
        if ranks[own] != self._world_rank:
            self.problems.append(
                f"{where}: {match[0]} is of world rank {ranks[own]}, but the file name says {self._world_rank}"
            )
            return
        kind = "input" if is_send else "output"
        tensors = _tensors(entry.get(f"{kind}_sizes"), entry.get(f"{kind}_dtypes"))
        if tensors is None:
            self.problems.append(f"{where}: {kind}_sizes and {kind}_dtypes are not lists of sizes and types")
            return
        self.operations.append(Operation(is_send, ranks[peer], entry["state"], tensors))
        self._launches.append(launch)
        self.used_groups.add(tuple(ranks))

    def _complete(self, launch: tuple[str, object], state: str) -> None:
        """Give the operations of a coalesced launch its state: they have none of their own."""
        index = len(self.operations)
        while index and self._launches[index - 1] == launch:
            index -= 1
            self.operations[index] = replace(self.operations[index], state=state)


def _tensors(sizes: object, types: object) -> tuple[str, ...] | None:
    """The tensors of an operation as texts; None if these are not their sizes and types."""
    if not isinstance(sizes, list) or not isinstance(types, list) or len(sizes) != len(types):
        return None
    for size, dtype in zip(sizes, types, strict=True):
        fits = isinstance(size, list) and len(size) <= _DEEPEST and all(type(each) is int for each in size)
        if not fits or not isinstance(dtype, str):
            return None
    return tuple(f"{printable(dtype)} {size}" for size, dtype in zip(sizes, types, strict=True))


def _shown(value: object) -> str:
    """A value in a message; the text of a container may be of any length."""
    return (
        printable(repr(value)) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"
    )


# The orders in which torch's runtimes issue the messages of a compute schedule.
#
# classes for several stages per rank   as `add-communication`: a receive where the value is sent
# GPipe and 1F1B                        at use: a receive directly before its use, a send directly after F or B


def message_orders(schedule: Schedule) -> list[Schedule]:
    """The schedule with its own messages, or else with those of each runtime of torch."""
    if schedule.table.has_communication or schedule.num_ranks == 1:
        return [schedule]
    lowered = [lower(schedule, [AddCommunication()])]
    return lowered + [messages_at_use(schedule)] * schedule.graph.is_chain


def messages_at_use(schedule: Schedule) -> Schedule:
    """A compute schedule over a chain with each receive before its use and each send after its computation."""
    rows = [
        [each for step in row for each in _with_messages(step, schedule, rank)]
        for rank, row in enumerate(schedule.ranks)
    ]
    return Schedule(rows, schedule.placement, schedule.microbatches, schedule.name, schedule.graph)


def _with_messages(step: Step, schedule: Schedule, rank: int) -> Iterator[Step]:
    graph, rank_of = schedule.graph, schedule.placement.stage_to_rank

    def messages(forward: Kind, backward: Kind, *, sent: bool) -> Iterator[Action]:
        for part in step.parts:
            if part.kind in (Kind.F, Kind.B, Kind.I):
                is_forward = part.kind is Kind.F
                stages = graph.outputs(part.stage) if is_forward is sent else graph.inputs(part.stage)
                kind = forward if is_forward else backward
                yield from (
                    Action(kind, part.stage, part.microbatch, other)
                    for other in stages
                    if rank_of[other] != rank
                )

    yield from messages(Kind.RECV_F, Kind.RECV_B, sent=False)
    yield step
    yield from messages(Kind.SEND_F, Kind.SEND_B, sent=True)


# Finds where in a schedule the sends and receives of flight records are: records become states of ranks.
#
# A record has no names of actions. But a rank issues its messages in the order of its list, step after step, so
# the last operations of the record (is it a send, to whom) fit only one place of the list:
#
#     list     recv<-0  send->2  recv<-0  send->2  recv<-2  send->0  recv<-2  send->0
#     record                     ... recv<-0  send->2  recv<-2           the first pending one: 1RECV_B0
#
# Operations before the first step (torch exchanges shapes) fit no place; they have other tensors.


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


@dataclass(frozen=True)
class PipelineEvidence:
    """What is known of the ranks of one pipeline."""

    members: tuple[int, ...]
    states: tuple[RankState, ...]
    differences: Mapping[int, str] = field(default_factory=dict)
    """The ranks whose operations are not in the schedule, where a flight record shows it."""


def align_records(records: Sequence[FlightRecord], schedule: Schedule) -> list[PipelineEvidence]:
    """Return the states of the ranks of each pipeline that the records are of."""
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
            f"has {plural(size, 'rank')}: give the schedule of this run as ",
            Parameter("schedule"),
        )
    return [tuple(sorted(ranks)) for ranks in connected]


def _aligned(records: Sequence[FlightRecord], members: tuple[int, ...], schedule: Schedule) -> PipelineEvidence:
    """The states by the order of messages that fits best."""
    orders = []
    for order in message_orders(schedule):
        messages = [_messages(order, members, members.index(record.world_rank)) for record in records]
        orders.append((order, messages, [_fit(*each) for each in zip(records, messages)]))
    order, messages, fits = max(orders, key=lambda found: sum(fit.matched for fit in found[2]))
    states, differences = [], {}
    for record, own, fit in zip(records, messages, fits):
        state = RankState(members, record.world_rank, order, runtime="flight recorder", source=record.source)
        if record.operations and _is_complete(fit, record, own):
            state = _located(state, record, own, fit)
        elif record.operations:
            differences[state.rank] = _difference(record, own)
        states.append(state)
    return PipelineEvidence(members, tuple(_same_steps(states, set(differences))), differences)


def _messages(schedule: Schedule, members: tuple[int, ...], rank: int) -> list[_Message]:
    rank_of_stage = schedule.placement.stage_to_rank
    return [
        _Message(position, part, members[rank_of_stage[part.other_end]])
        for position, step in enumerate(schedule.ranks[rank])
        for part in step.parts
        if part.kind.is_communication
    ]


def _fit(record: FlightRecord, messages: Sequence[_Message]) -> _Fit:
    """The place where most operations at the end of the record fit the list, repeated step by step."""
    found = np.array([operation.code for operation in record.operations], dtype=np.int64)[::-1]
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
            best = max(best, fit, key=lambda each: (each.matched, each.at_start, -each.tensors))
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
        {(operation.code, operation.tensors) for operation in part}
        for part in (record.operations[:split], record.operations[split:])
    )
    return fit.at_start and fit.matched > 0 and not before & since


def _difference(record: FlightRecord, messages: Sequence[_Message]) -> str:
    """The first operation that is not the list's, counted from the beginning of the step that fits best."""
    pattern = [message.code for message in messages]
    codes = [operation.code for operation in record.operations]
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


def _located(state: RankState, record: FlightRecord, messages: Sequence[_Message], fit: _Fit) -> RankState:
    """The state at the first pending operation, or after the last one if all are completed."""
    length = len(messages) * fit.tensors
    tail = record.operations[len(record.operations) - fit.matched :]
    first = fit.last - len(tail) + 1  # the number of the first of them, from the start of the current step
    pending = next((n for n, each in enumerate(tail, first) if each.state != "completed"), None)
    place = fit.last + 1 if pending is None else pending
    begin = (fit.last if pending is None else pending) // length * length
    index = (place - begin) // fit.tensors
    if pending is not None:
        position, awaits = messages[index].position, str(messages[index].action)
    else:
        position = messages[index - 1].position + 1 if index < len(messages) else len(state.steps)
        awaits = ""
    collective = Wait(WaitKind.COLLECTIVE, f"the collective {record.collective}") if record.collective else None
    return replace(
        state,
        position=position,
        awaits=awaits,
        waiting_for=None if awaits else collective,
        messages=_tensors_by_action(tail, first - begin, messages, fit),
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
        step = 0 if near is None else near.step_number + _step_offset(state, near)
        found[state.rank] = replace(state, step_number=step)
        left.sort(key=lambda each: not any(_shared(each, other) for other in found.values()))
    lowest = min((state.step_number for state in found.values()), default=0)
    for rank, state in found.items():
        number = state.step_number - lowest
        found[rank] = replace(state, step_number=number, call_number=number)
    return [found.get(state.rank, state) for state in states]


def _passed(state: RankState) -> dict[tuple[int, int, bool], tuple[int, int]]:
    """Per channel (from rank, to rank, gradients): the messages passed in this step, and all of a step."""
    rank_of_stage = state.schedule.placement.stage_to_rank
    counts: dict[tuple[int, int, bool], tuple[int, int]] = {}
    for position, step in enumerate(state.schedule.ranks[state.rank]):
        for part in step.parts:
            if part.kind.is_communication:
                ends = rank_of_stage[part.stage], rank_of_stage[part.other_end]
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
