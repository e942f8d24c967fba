"""The simulator: when does each step of a schedule start and end, when does each message move, at given costs?

Every rank runs its list in order. A compute step waits for the rank's compute stream, for the messages it needs
and for its stage to be unsharded. UNSHARD, RESHARD and REDUCE_GRAD run one after the other on the rank's
collective stream, OFFLOADs and RELOADs each on their direction of the rank's host link. A RELOAD waits for its
OFFLOAD, and what needs the reloaded activation waits for the RELOAD. A message moves as the send model
(`penstock.validation.send_model`) allows:

    posted (send, receive)  ->  begins when its stream is free  ->  arrives after bytes/bandwidth + latency

A buffered channel is free again once it has taken the bytes, a stream only once the message has arrived. In a
schedule without SEND and RECV, a value is sent when it is computed and its receive is already posted.

Two engines give one answer: `ir.dataflow` where messages cost latency only, `simulation.network` for the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np

from penstock.arguments import printable
from penstock.cost.costs import Costs
from penstock.cost.prices import collectives_take_time, host_copies_take_time, message_seconds, step_seconds
from penstock.errors import CostsError, ScheduleError
from penstock.ir.dataflow import Inputs, run_dataflow
from penstock.ir.encoding import Bools, Floats, Ints
from penstock.ir.kinds import Kind
from penstock.ir.schedule import Schedule
from penstock.lowering import AddCommunication
from penstock.simulation.network import EventGraph, Network, RunTimes, Waits
from penstock.simulation.timeline import Timeline
from penstock.validation import SendModel, invalid_schedule_error, validate

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
    run = simulator.finished_run()
    return Timeline(
        schedule, simulator.costs, *simulator.times(run), period=simulator.period(run) if with_period else None
    )


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
            raise _no_messages_error(schedule, model)
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

    def run(
        self,
        starts: Sequence[float] | None = None,
        durations: Sequence[float] | Floats | None = None,
        stream_free: Floats | None = None,
    ) -> RunTimes:
        """One iteration of `executed`, from these clocks of the ranks on, with these durations of the steps.

        `stream_free` is that of the iteration before: its last messages may still occupy their streams.
        """
        starts = [0] * self.executed.num_ranks if starts is None else starts
        durations = self.durations if durations is None else durations
        if self._network is not None:
            return self._network.run(starts, np.asarray(durations, dtype=np.float64), stream_free)
        ends = run_dataflow(self.executed.table, self._inputs, durations, starts).ends
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

    def times(self, run: RunTimes) -> tuple[Floats, Floats, Floats | None, Floats | None]:
        """Start and end per slot of the given schedule; begin and arrival per message."""
        kept = self._given_slots
        return run.start[kept], run.end[kept], run.begin, run.arrival

    @property
    def _given_slots(self) -> Bools | slice:
        if self.executed is self._given:
            return slice(None)
        added = np.zeros(self.executed.num_steps, dtype=np.bool_)
        added[self.executed.table.slot[self.executed.table.is_communication]] = True
        return ~added

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


def _no_messages_error(schedule: Schedule, model: SendModel) -> ScheduleError:
    what = "blocking receives" if model.is_buffered else f"send model {model}"
    return ScheduleError(
        f"{what}: {schedule.name} has no SEND and RECV actions to block; lower it first: "
        "penstock.lower(schedule), or --lowered on the command line"
    )
