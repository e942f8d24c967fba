"""The simulator: when does each step of a schedule start and end, when does each message move, at given costs?

Every rank runs its list in order. A compute step waits for the rank's compute stream, for the messages it needs
and for its stage to be unsharded. UNSHARD, RESHARD and REDUCE_GRAD run one after the other on the rank's
collective stream, OFFLOADs and RELOADs each on their direction of the rank's host link. A RELOAD waits for its
OFFLOAD, and what needs the reloaded activation waits for the RELOAD. A message moves as the send model
(`penstock.validation.send_model`) allows:

    posted (send, receive)  ->  begins when its stream is free  ->  arrives after bytes/bandwidth + latency

A buffered channel is free again once it has taken the bytes, a stream only once the message has arrived. In a
schedule without SEND and RECV, a value is sent when it is computed and its receive is already posted.

Two engines compute the same times: `ir.dataflow` where messages cost latency only, `Network` for the rest.
"""

# ruff: noqa: ANN401 -- a loop runs over lists or arrays

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from penstock.arguments import printable
from penstock.cost.costs import Costs
from penstock.cost.prices import collectives_take_time, host_copies_take_time, message_seconds, step_seconds
from penstock.errors import CostsError, ScheduleError
from penstock.ir.dataflow import Inputs, run_dataflow
from penstock.ir.encoding import Bools, Floats, Ints
from penstock.ir.kinds import SEND_WAITS, Kind, Resource
from penstock.ir.messages import Messages
from penstock.ir.schedule import Schedule
from penstock.loops import Loop
from penstock.lowering import AddCommunication
from penstock.simulation.timeline import Timeline
from penstock.validation import SendModel, invalid_schedule_error, validate

# Event graphs: events that wait for events, each as early as possible, in one run or in many at once.
#
#     start(i) = max(floor(i), max over inputs d of i: end(d) + lag)
#     end(i)   = start(i) + duration(i)
#
# Which event waits for which does not depend on the durations. So many runs with other durations are one pass
# over the *wavefronts*: events whose inputs are all in earlier wavefronts, each with one number per run.


_NOT_YET = -1.0
_NEW, _OPEN, _DONE, _STUCK = range(4)


class Waits(NamedTuple):
    """Event `after[i]` waits for the end of event `before[i]` and `lag[i]`, or `lag` for all, from then on."""

    before: Ints
    after: Ints
    lag: Floats | float = 0.0


@dataclass(frozen=True, eq=False)
class EventGraph:
    """What each event waits for; events are numbered from 0."""

    bounds: Ints
    """Per event, and one more: where its waits begin."""
    producer: Ints
    lag: Floats

    @classmethod
    def of(cls, num_events: int, waits: Sequence[Waits]) -> EventGraph:
        """From waits in no particular order."""
        before, after = (np.concatenate([each[side] for each in waits]).astype(np.int64) for side in (0, 1))
        lag = np.concatenate([np.broadcast_to(np.float64(each.lag), each.before.shape) for each in waits])
        order = np.argsort(after, kind="stable")
        bounds = np.concatenate(([0], np.cumsum(np.bincount(after, minlength=num_events))))
        return cls(bounds, before[order], lag[order])

    def run(self, durations: Floats, floor: Floats) -> tuple[Floats, Floats]:
        """Return start and end of every event; -1 for events in or behind a cycle."""
        events = len(floor)
        start, end = np.full(events, _NOT_YET), np.full(events, _NOT_YET)
        state, stack, cursor = (np.zeros(events, dtype=np.int64) for _ in range(3))
        inputs = (self.bounds, self.producer, self.lag, durations, floor)
        _RUN.run(2 * events, inputs, (start, end, state, stack, cursor))
        return start, end

    @cached_property
    def wavefronts(self) -> list[Ints]:
        """The events in groups: each waits for events of earlier groups only; without those in cycles."""
        events = len(self.bounds) - 1
        unit = EventGraph(self.bounds, self.producer, np.zeros_like(self.lag))
        level = unit.run(np.ones(events), np.zeros(events))[1].astype(np.int64)
        order = np.argsort(level, kind="stable")
        return np.split(order, np.flatnonzero(np.diff(level[order])) + 1)

    def run_many(self, durations: Floats, floor: Floats) -> Floats:
        """The end of every event in every run; `durations` has a row per event and a column per run."""
        ends = np.empty_like(durations)
        counts = np.diff(self.bounds)
        for events in self.wavefronts:
            waiting, free = events[counts[events] > 0], events[counts[events] == 0]
            ends[free] = floor[free, None] + durations[free]
            if waiting.size:
                first = np.cumsum(counts[waiting]) - counts[waiting]
                waits = np.repeat(self.bounds[waiting] - first, counts[waiting])
                waits += np.arange(len(waits))
                arrivals = ends[self.producer[waits]]
                arrivals += self.lag[waits, None]
                latest = np.maximum.reduceat(arrivals, first, axis=0)
                np.maximum(latest, floor[waiting, None], out=latest)
                latest += durations[waiting]
                ends[waiting] = latest
        return ends


def _run(
    bounds: Any,
    producer: Any,
    lag: Any,
    durations: Any,
    floor: Any,
    start: Any,
    end: Any,
    state: Any,
    stack: Any,
    cursor: Any,
) -> None:
    """Depth-first: an event that waits for a new one stays on the stack until that one is done."""
    for root in range(len(state)):
        if state[root] != _NEW:
            continue
        top, stack[0], state[root], cursor[root] = 0, root, _OPEN, bounds[root]
        while top >= 0:
            event = stack[top]
            i, stop, result = cursor[event], bounds[event + 1], _DONE
            while i < stop:
                result = state[producer[i]]
                if result != _DONE:
                    break
                i += 1
            cursor[event] = i
            if i < stop and result == _NEW:
                top += 1
                new = producer[i]
                stack[top], state[new], cursor[new] = new, _OPEN, bounds[new]
                continue
            top -= 1
            if i < stop:  # it waits for one that waits for it, or for one that is stuck
                state[event] = _STUCK
                continue
            now = floor[event]
            for j in range(bounds[event], stop):
                arrival = end[producer[j]] + lag[j]
                if arrival > now:  # noqa: PLR1730 -- max() would double the time of this loop
                    now = arrival
            start[event] = now
            end[event] = now + durations[event]
            state[event] = _DONE


_RUN = Loop(_run)


# The network engine: every rank's list, its messages, collectives and copies to the host, event by event.
#
# The dataflow engine (`penstock.ir.dataflow`) knows steps that wait for steps. Here messages are events of
# their own: posted by their send and their receive, queued in a stream, in transfer, arrived. All of it is one
# event graph: the starts of the ranks, then the slots, then the messages.
#
#   a slot      waits for its rank's last step before it that moves the clock, for what occupies its stream, and
#                 for the messages, the UNSHARD and the copies that it needs
#   a message   takes its transfer time; it waits for the clocks at which its send and its receive are reached,
#                 and for the messages directly ahead of it in its streams


_COMPUTE, _CHANNEL, _COLLECTIVE, _TO_HOST, _FROM_HOST, _RANK = range(len(Resource))
_RESOURCES = np.array([list(Resource).index(kind.spec.resource) for kind in Kind])
"""By the number of a kind."""
_HANDLED = (
    *(Kind.F, Kind.I, Kind.W, Kind.B, Kind.RECOMPUTE, Kind.OVERLAP_F_B),
    *(Kind.SEND_F, Kind.SEND_B, Kind.RECV_F, Kind.RECV_B, *SEND_WAITS),
    *(Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD, Kind.WAIT_REDUCE_GRAD, Kind.OFFLOAD, Kind.RELOAD),
)


@dataclass(frozen=True, eq=False)
class RunTimes:
    """When each slot started and ended; when each message (`penstock.ir.messages`) began and arrived.

    Where messages were not followed, `begin` and `arrival` are None; a message that does not exist has nan.
    """

    start: Floats
    end: Floats
    begin: Floats | None = None
    arrival: Floats | None = None
    stream_free: Floats | None = None
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
        table.require_handled(_HANDLED, "simulation")
        self.messages, self.numbers = messages, np.flatnonzero(messages.paired)
        paired = self.numbers
        self.send, self.receive = (table.slots_of(end[paired]) for end in (messages.send, messages.receive))
        self.transfer, self.latency = transfer[paired], latency[paired]
        self.buffered, self.sends_block = send_model.is_buffered, send_model.blocks_rank
        self.receives_block = blocking_receives or send_model.blocks_rank
        # a slot is of one kind; the first part represents an overlapped pair
        self.resource = _RESOURCES[table.kind[np.searchsorted(table.slot, np.arange(len(table.rank)))]]
        streams = send_model.streams(
            messages.source[paired], messages.target[paired], table.placement.num_ranks
        )
        known, numbers = np.unique(np.concatenate(streams), return_inverse=True)
        self.streams = numbers.reshape(2, -1)
        """Per message: the streams that it queues in at its sender and at its receiver."""
        self.num_streams, ranks = len(known), table.placement.num_ranks
        self.first_slot, self.first_message = ranks, ranks + len(table.rank)
        self.num_events = self.first_message + len(paired)
        self.graph = EventGraph.of(self.num_events, list(self._waits()))

    def _waits(self) -> Iterator[Waits]:
        table, slots = self.table, np.arange(len(self.table.rank))
        message = self.first_message + np.arange(len(self.numbers))
        clock = self.clock_before
        yield Waits(clock, self.first_slot + slots)
        yield Waits(clock[self.send], message)
        consumer = table.slots_of(self.messages.consumer[self.numbers])
        used = consumer >= 0
        yield Waits(message[used], self.first_slot + consumer[used], self.latency[used])
        if not self.buffered:
            yield Waits(clock[self.receive], message)
        for ends, block in ((self.send, self.sends_block), (self.receive, self.receives_block)):
            if block:
                yield Waits(message, self.first_slot + ends, self.latency)
        waits = table.slots_of(self.messages.send_wait[self.numbers])
        waited = waits >= 0  # a buffered channel has taken the bytes before the message has arrived
        lag = 0.0 if self.buffered else self.latency[waited]
        yield Waits(message[waited], self.first_slot + waits[waited], lag)
        yield from self._reductions()
        copies, waiting = table.host_copy_waits
        yield Waits(self.first_slot + copies, self.first_slot + waiting)
        yield from self._queues()
        yield from self._unshards()
        for resource in (_COLLECTIVE, _TO_HOST, _FROM_HOST):
            own = np.flatnonzero(self.resource == resource)
            same = table.rank[own[1:]] == table.rank[own[:-1]]
            yield Waits(self.first_slot + own[:-1][same], self.first_slot + own[1:][same])

    @property
    def clock_before(self) -> Ints:
        """Per slot: the event at whose end its rank reaches it."""
        table, slots = self.table, np.arange(len(self.table.rank))
        moves = np.isin(self.resource, (_COMPUTE, _CHANNEL, _RANK))
        last = np.concatenate(([-1], np.maximum.accumulate(np.where(moves, slots, -1))))[: len(slots)]
        return np.where(last >= table.slot_bounds[table.rank], self.first_slot + last, table.rank)

    def _queues(self) -> Iterator[Waits]:
        """Messages wait for those directly ahead of them in their streams."""
        _, order, same = self._in_streams
        ahead, behind = order[:-1][same] % len(self.numbers), order[1:][same] % len(self.numbers)
        # a buffered channel is free once it has taken the bytes, a stream once the message has arrived
        lag = 0.0 if self.buffered else self.latency[ahead]
        yield Waits(self.first_message + ahead, self.first_message + behind, lag)

    @property
    def _in_streams(self) -> tuple[Ints, Ints, Bools]:
        """All messages at their senders, then at their receivers: streams, an order by stream and list, where
        the next in the order is in the same stream.
        """
        stream = self.streams.ravel()
        order = np.lexsort((np.concatenate((self.send, self.receive)), stream))
        return stream, order, stream[order][1:] == stream[order][:-1]

    def _reductions(self) -> Iterator[Waits]:
        """A WAIT_REDUCE_GRAD waits for the REDUCE_GRAD of its stage."""
        if self.table.has(Kind.WAIT_REDUCE_GRAD):
            kinds = (Kind.REDUCE_GRAD, Kind.WAIT_REDUCE_GRAD)
            reduction, wait = (self.table.slots_of(self.table.at(kind)[:, 0]) for kind in kinds)
            both = (reduction >= 0) & (wait >= 0)
            yield Waits(self.first_slot + reduction[both], self.first_slot + wait[both])

    def _unshards(self) -> Iterator[Waits]:
        """Compute waits for the last UNSHARD of its stage before it."""
        table = self.table
        parts = np.flatnonzero(table.of_kind(Kind.UNSHARD) | (self.resource == _COMPUTE)[table.slot])
        parts = parts[np.argsort(table.stage[parts], kind="stable")]
        unshards = table.of_kind(Kind.UNSHARD)[parts]
        latest = np.maximum.accumulate(np.where(unshards, np.arange(len(parts)), -1))
        waiting = np.flatnonzero(~unshards & (latest >= 0))
        by = latest[waiting]
        own = table.stage[parts[by]] == table.stage[parts[waiting]]
        before, after = table.slot[parts[by[own]]], table.slot[parts[waiting[own]]]
        yield Waits(self.first_slot + before, self.first_slot + after)

    def durations(self, of_slots: Floats) -> Floats:
        """Per event: the given seconds of slots, the transfer time of messages; also for a column per run."""
        shape = of_slots.shape[1:]
        transfer = np.broadcast_to(self.transfer.reshape(-1, *(1 for _ in shape)), (len(self.transfer), *shape))
        seconds = np.concatenate((np.zeros((self.first_slot, *shape)), of_slots, transfer))
        seconds[self.first_slot : self.first_message][self.resource == _CHANNEL] = 0.0
        return seconds

    def floor(self, starts: Sequence[float] | Floats, stream_free: Floats | None) -> Floats:
        """Per event: the earliest start, from the clocks of the ranks and streams that may still be busy."""
        floor = np.zeros(self.num_events)
        floor[: self.first_slot] = starts
        floor[self.first_slot : self.first_message] = -np.inf
        if stream_free is not None and len(self.numbers):
            stream, order, same = self._in_streams
            first = order[np.concatenate(([True], ~same))]
            message = self.first_message + first % len(self.numbers)
            np.maximum.at(floor, message, stream_free[stream[first]])
        return floor

    def run(
        self, starts: Sequence[float] | Floats, durations: Floats, stream_free: Floats | None = None
    ) -> RunTimes:
        """One iteration, from these clocks of the ranks on, with streams that may still be busy."""
        start, end = self.graph.run(self.durations(durations), self.floor(starts, stream_free))
        slots, messages = slice(self.first_slot, self.first_message), slice(self.first_message, None)
        posted = np.isin(self.resource, (_CHANNEL, _RANK))
        begun = start[slots]
        begun[posted] = end[self.clock_before][posted]  # also where the step then waits for its message
        arrival = np.where(end[messages] < 0, end[messages], end[messages] + self.latency)
        times = np.full((2, len(self.messages.send)), np.nan)
        times[:, self.numbers] = start[messages], arrival
        free = np.zeros(self.num_streams) if stream_free is None else stream_free.copy()
        held = end[messages] if self.buffered else arrival
        np.maximum.at(free, self.streams.ravel(), np.tile(held, 2))
        return RunTimes(begun, end[slots], times[0], times[1], free)


_WARM_UP, _MEASURED = 4, 4  # iterations before, and in, the mean that is the period


def simulate(
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    send_model: SendModel | str = SendModel.BUFFERED,
    blocking_receives: bool = False,
    with_period: bool = False,
) -> Timeline:
    """The timeline of one iteration of this schedule. Raises all violations of an invalid schedule.

    `send_model` is `buffered` unless given; the others, and `blocking_receives`, need a schedule with SEND and
    RECV (`penstock.lower`). With `blocking_receives`, a receive that is reached before its message arrives
    blocks its rank, also for work that does not need this message. With `with_period`, iterations are repeated
    to fill in `Timeline.period`.
    """
    simulator = Simulator.of_valid(schedule, costs, send_model, blocking_receives=blocking_receives)
    return simulator.timeline(simulator.finished_run(), with_period=with_period)


class Simulator:
    """A valid schedule and its costs, prepared to be run once or many times."""

    def __init__(
        self,
        schedule: Schedule,
        costs: Costs,
        send_model: SendModel | str = SendModel.BUFFERED,
        *,
        blocking_receives: bool = False,
    ) -> None:
        model = SendModel.of(send_model)
        self.costs, self._given = costs, schedule
        communicates = schedule.table.has_communication or not len(schedule.messages.edge)
        if not communicates and (not model.is_buffered or blocking_receives):
            what = "blocking receives" if model.is_buffered else f"send model {model}"
            raise ScheduleError(
                f"{what}: {schedule.name} has no SEND and RECV actions to block; lower it first: "
                "penstock.lower(schedule)"
            )
        costs.check_lengths(schedule.graph, schedule.num_ranks)
        followed = costs.bandwidth is not None or not model.is_buffered or blocking_receives
        followed |= not schedule.table.only_compute and collectives_take_time(costs)
        followed |= schedule.table.has(Kind.OFFLOAD, Kind.RELOAD) and host_copies_take_time(costs)
        # values sent as soon as they exist: the same as a SEND after each producer, and a RECV posted ahead
        self.executed = schedule if communicates or not followed else AddCommunication()(schedule)
        """The schedule that runs: the given one, or the same with SEND and RECV."""
        self.durations: Floats = step_seconds(self.executed.table, costs)
        """Per slot of `executed`."""
        self._network: Network | None = None
        if followed:
            messages = self.executed.messages
            seconds = message_seconds(messages, costs)
            self._network = Network(messages, *seconds, model, blocking_receives=blocking_receives)
            return
        self._producer, self._consumer, self._lag = message_waits(schedule, costs)
        self._inputs = Inputs.of(schedule.num_steps, self._producer, self._consumer, self._lag)

    @classmethod
    def of_valid(
        cls,
        schedule: Schedule,
        costs: Costs | None,
        send_model: SendModel | str,
        *,
        blocking_receives: bool = False,
    ) -> Simulator:
        """For a schedule that is validated first."""
        if not isinstance(costs, Costs | None):
            raise CostsError(
                f"costs must be Costs (given {printable(repr(costs))}): penstock.Costs(forward=2), or "
                "penstock.Costs.read(path) for a file"
            )
        if violations := validate(schedule, send_model):
            raise invalid_schedule_error(schedule, violations)
        return cls(schedule, costs or Costs(), send_model, blocking_receives=blocking_receives)

    def run(self, starts: Sequence[float] | None = None, stream_free: Floats | None = None) -> RunTimes:
        """One iteration of `executed`, from these clocks of the ranks on.

        `stream_free` comes from the iteration before: its last messages may still occupy their streams.
        """
        starts = [0] * self.executed.num_ranks if starts is None else starts
        if self._network is not None:
            return self._network.run(starts, self.durations, stream_free)
        ends = run_dataflow(self.executed.table, self._inputs, self.durations, starts).ends
        return RunTimes(self._starts(ends, starts), ends)

    def makespans(self, durations: Floats) -> Floats:
        """Of many runs from time 0; `durations` has a row per slot of `executed` and a column per run."""
        ranks, slots = self.executed.num_ranks, self.executed.num_steps
        if self._network is not None:
            network = self._network
            ends = network.graph.run_many(network.durations(durations), network.floor(np.zeros(ranks), None))
        else:
            floor = np.where(np.arange(ranks + slots) < ranks, 0.0, -np.inf)
            ends = self._event_graph.run_many(
                np.concatenate((np.zeros((ranks, durations.shape[1])), durations)), floor
            )
        latest: Floats = ends[ranks : ranks + slots].max(axis=0, initial=0.0)
        return latest

    @cached_property
    def _event_graph(self) -> EventGraph:
        """The same run as `run_dataflow`: the starts of the ranks, then the slots."""
        table, ranks = self.executed.table, self.executed.num_ranks
        slots = np.arange(len(table.rank))
        before = np.where(slots > table.slot_bounds[table.rank], ranks + slots - 1, table.rank)
        lists = Waits(before, ranks + slots)
        messages = Waits(ranks + self._producer, ranks + self._consumer, self._lag)
        return EventGraph.of(ranks + len(slots), [lists, messages])

    def _starts(self, ends: Floats, starts: Sequence[float]) -> Floats:
        """When each slot began: when the one before it had ended and its inputs had arrived, bit for bit."""
        table = self.executed.table
        begun = np.concatenate(([0.0], ends))[:-1]
        first = table.slot_bounds[:-1]
        has_steps = first < table.slot_bounds[1:]
        begun[first[has_steps]] = np.array(starts, dtype=np.float64)[has_steps]
        np.maximum.at(begun, self._consumer, ends[self._producer] + self._lag)
        return begun

    def timeline(self, run: RunTimes, *, with_period: bool = False) -> Timeline:
        """The timeline of the given schedule: without the SEND and RECV that only `executed` has."""
        kept: Bools | slice = slice(None)
        if self.executed is not self._given:
            table = self.executed.table
            kept = np.ones(self.executed.num_steps, dtype=np.bool_)
            kept[table.slot[table.is_communication]] = False
        period = self.period(run) if with_period else None
        return Timeline(
            self._given, self.costs, run.start[kept], run.end[kept], run.begin, run.arrival, period=period
        )

    def period(self, first: RunTimes) -> float:
        """What one more iteration takes in the steady state, optimizer step included."""
        run, ends = first, self._last_ends(first)
        makespans = []
        for _ in range(_WARM_UP + _MEASURED):
            makespans.append(max(ends))
            run = self.run([end + self.costs.optimizer_step for end in ends], stream_free=run.stream_free)
            before, ends = ends, self._last_ends(run)
            if self._network is None and len({end - last for end, last in zip(ends, before)}) == 1:
                return ends[0] - before[0]  # all ranks are later by the same time, and so in every iteration
        return (max(ends) - makespans[_WARM_UP]) / _MEASURED

    def _last_ends(self, run: RunTimes) -> list[float]:
        bounds = self.executed.table.slot_bounds.tolist()
        return [float(run.end[a:b].max(initial=0)) for a, b in pairwise(bounds)]

    def finished_run(self) -> RunTimes:
        """A run in which every rank reaches its end; blocking receives can stop what sends alone do not."""
        run = self.run()
        stuck = np.flatnonzero(run.end < 0)
        if not stuck.size:
            return run
        table = self.executed.table
        first = {int(table.rank[slot]): int(slot) for slot in stuck[::-1]}  # of each rank, the first stays
        where = [
            f"rank {rank} at step {slot - int(table.slot_bounds[rank])}, "
            f"{self.executed.ranks[rank][slot - int(table.slot_bounds[rank])]}"
            for rank, slot in sorted(first.items())
        ]
        raise ScheduleError(
            f"with blocking receives the ranks wait for each other: {'; '.join(where)}; defer the receives "
            "(DeferReceives), or simulate receives that block only where the message is used"
        )


def message_waits(schedule: Schedule, costs: Costs) -> tuple[Ints, Ints, Floats]:
    """Per message, where these cost latency only: the slots that send and use it, and its latency."""
    table, messages = schedule.table, schedule.messages
    source = messages.send if table.has_communication else messages.producer
    known = (source >= 0) & (messages.consumer >= 0)
    _, latency = message_seconds(messages, costs)
    return table.slots_of(source[known]), table.slots_of(messages.consumer[known]), latency[known]
