"""Run a schedule at given costs: when does each step start and end, when does each message move?

Every rank walks its list. A compute step waits for the rank's compute stream, for the messages it needs and for
its stage to be unsharded. UNSHARD, RESHARD and REDUCE_GRAD go one after the other on the rank's collective
stream. A message moves when the way of sending (`penstock.validation.deadlock`) lets it:

    posted (send, receive)  ->  begins when its stream is free  ->  arrives after bytes/bandwidth + latency

A buffered channel is free again once it has taken the bytes, a stream only once the message has arrived. A
compute schedule is run as if each value were sent when it is made and received at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.cost.costs import Costs
from penstock.errors import ScheduleError
from penstock.ir.action import Kind
from penstock.ir.dataflow import Inputs, replay
from penstock.ir.schedule import Schedule
from penstock.ir.table import Floats, Ints
from penstock.lowering import AddCommunication
from penstock.simulation.network import Run, Walk
from penstock.simulation.timeline import Timeline
from penstock.validation import MODELS, refusal, validate
from penstock.validation.communication import Messages

__all__ = ["Engine", "simulate"]


def simulate(
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    sends: str = MODELS[0],
    blocking_receives: bool = False,
) -> Timeline:
    """The timeline of one iteration. A schedule with faults is refused with the validator's report.

    `sends` is how sends behave, `buffered` unless said. With `blocking_receives`, a receive that is reached
    before its message arrives holds up its rank: work behind it that is not for this message waits too.
    """
    if faults := validate(schedule, sends):
        raise refusal(schedule, faults)
    engine = Engine(schedule, costs or Costs(), sends=sends, blocking_receives=blocking_receives)
    return Timeline(engine.schedule, engine.costs, finished(engine, engine.run()), engine.run)


def finished(engine: Engine, run: Run) -> Run:
    """The run, if every rank reached its end; receives that block can stop what sends alone do not."""
    stuck = np.flatnonzero(run.end < 0)
    if not stuck.size:
        return run
    table = engine.schedule.table
    heads = {int(table.rank[slot]): int(slot) for slot in stuck[::-1]}  # the first of each rank stays
    where = [
        f"rank {rank} at step {slot - int(table.slot_bounds[rank])}, "
        f"{engine.schedule.ranks[rank][slot - int(table.slot_bounds[rank])]}"
        for rank, slot in sorted(heads.items())
    ]
    raise ScheduleError(
        "with receives that block, the ranks wait for each other: "
        + "; ".join(where)
        + "; defer the receives, "
        "or let them wait only where they are used"
    )


class Engine:
    """A right schedule and its costs made ready to be run, once or many times."""

    def __init__(
        self, schedule: Schedule, costs: Costs, *, sends: str = MODELS[0], blocking_receives: bool = False
    ) -> None:
        if sends not in MODELS:
            raise ScheduleError(f"no way of sending is called {sends!r}; there are {', '.join(MODELS)}")
        follows_messages = costs.bandwidth is not None or sends != MODELS[0] or blocking_receives
        follows_messages |= not schedule.table.only_compute and _collectives_take_time(costs)
        if follows_messages and not schedule.table.has_communication and schedule.num_ranks > 1:
            schedule = AddCommunication()(schedule)
        self.schedule, self.costs = schedule, costs
        costs.check_lengths(schedule.num_stages)
        self.durations = _durations(schedule, costs)
        table = schedule.table
        self._walk: Walk | None = None
        if follows_messages:
            messages = Messages.of(table)
            taken, latency = _message_costs(schedule, costs)
            self._walk = Walk(table, taken, latency, messages, sends, blocking=blocking_receives)
        else:
            self._producer, self._consumer, self._lag = _waits(schedule, costs)
            self._inputs = Inputs.of(schedule.num_steps, self._producer, self._consumer, self._lag)

    def run(self, starts: Sequence[float] | None = None, durations: Sequence[float] | None = None) -> Run:
        """One iteration, from these clocks of the ranks on, with these durations of the steps."""
        starts = [0] * self.schedule.num_ranks if starts is None else starts
        durations = self.durations if durations is None else durations
        if self._walk is not None:
            return self._walk.run(starts, durations)
        ends = np.array(replay(self.schedule.table, self._inputs, durations, starts).ends, dtype=np.float64)
        return Run(self._starts(ends, starts), ends, None)

    def _starts(self, ends: Floats, starts: Sequence[float]) -> Floats:
        """When each slot began: when the one before it and its inputs were there, to the last bit."""
        table = self.schedule.table
        begun = np.concatenate(([0.0], ends))[:-1]
        first = table.slot_bounds[:-1]
        there = first < table.slot_bounds[1:]
        begun[first[there]] = np.array(starts, dtype=np.float64)[there]
        np.maximum.at(begun, self._consumer, ends[self._producer] + self._lag)
        return begun


def _durations(schedule: Schedule, costs: Costs) -> list[float]:
    """Seconds per slot."""
    table, stages = schedule.table, schedule.num_stages
    seconds_of = np.zeros((len(Kind), stages))
    for kind, name in (
        (Kind.F, "forward"),
        (Kind.I, "backward_input"),
        (Kind.W, "backward_weight"),
        (Kind.UNSHARD, "unshard"),
        (Kind.RESHARD, "reshard"),
        (Kind.REDUCE_GRAD, "reduce_grad"),
    ):
        seconds_of[kind.number] = costs.per_stage(name, stages)
    seconds_of[Kind.B.number] = costs.full_backward(stages)
    part = seconds_of[table.kind, table.stage]
    slot = table.slot
    total = np.bincount(slot, weights=part, minlength=schedule.num_steps)
    second = np.concatenate(([False], slot[1:] == slot[:-1]))[: len(slot)]
    if second.any():
        pairs = slot[second]
        longer = np.maximum(part[second], part[np.flatnonzero(second) - 1])
        overlapped = longer + costs.overlap_factor * (total[pairs] - longer)
        total[pairs] = overlapped if costs.overlap is None else costs.overlap
    if costs.launch_overhead:
        total[slot[table.is_compute & ~second]] += costs.launch_overhead
    seconds: list[float] = total.tolist()
    return seconds


def _collectives_take_time(costs: Costs) -> bool:
    values = (np.asarray(getattr(costs, name)) for name in ("unshard", "reshard", "reduce_grad"))
    return any(bool(np.any(value > 0)) for value in values)


def _waits(schedule: Schedule, costs: Costs) -> tuple[Ints, Ints, Floats]:
    """Which slot waits for which, and the latency between: for the send, or without sends for what makes it."""
    table, messages = schedule.table, Messages.of(schedule.table)
    _, latency = _message_costs(schedule, costs)
    source = messages.send if table.has_communication else messages.producer
    there = (source >= 0) & (messages.consumer >= 0)
    return table.slot[source[there]], table.slot[messages.consumer[there]], latency[there]


def _message_costs(schedule: Schedule, costs: Costs) -> tuple[Floats, Floats]:
    """Per message, in the order of `Messages`: how long its channel takes the bytes, and the latency."""
    table, stages = schedule.table, schedule.num_stages
    apart = table.apart
    latency = np.array(costs.per_edge("latency", stages), dtype=np.float64)[apart]
    taken = np.zeros(2 * len(latency))
    if costs.bandwidth is not None:
        speed = np.array(costs.per_edge("bandwidth", stages))[apart]
        both = [
            np.array(costs.per_edge(f"{value}_message", stages))[apart] for value in ("activation", "gradient")
        ]
        taken = np.concatenate([size / speed for size in both])
    m = table.microbatches
    return np.repeat(taken, m), np.repeat(np.tile(latency, 2), m)
