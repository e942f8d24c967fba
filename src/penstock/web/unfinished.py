"""Times of a schedule that cannot run to its end: what could run, and the rest as if its waits were met.

The editor draws every schedule, also one with a deadlock or with missing steps. A step that waits for
something that never comes is `blocked`; to place it and what follows, it starts as soon as its rank reaches it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.cost.costs import Costs
from penstock.cost.prices import step_seconds
from penstock.ir.dataflow import Inputs, run_dataflow
from penstock.ir.encoding import Bools
from penstock.ir.schedule import Schedule
from penstock.simulation.simulator import message_waits
from penstock.simulation.timeline import Timeline


@dataclass(frozen=True, eq=False)
class Unfinished:
    """A timeline of an invalid schedule, and what cannot really run."""

    timeline: Timeline
    blocked: tuple[int, ...]
    """The slots that wait for ever, in the order in which ranks get stuck."""
    reached: Bools
    """Per slot: whether it really runs."""


def lay_out(schedule: Schedule, costs: Costs) -> Unfinished:
    """Run the schedule; whenever all ranks are stuck, drop the waits of the steps they are stuck at."""
    table = schedule.table
    durations = step_seconds(table, costs).tolist()
    producer, consumer, lag = message_waits(schedule, costs)
    starts = [0.0] * schedule.num_ranks
    blocked: list[int] = []
    reached: Bools | None = None
    while True:
        inputs = Inputs.of(schedule.num_steps, producer, consumer, lag)
        run = run_dataflow(table, inputs, durations, starts)
        reached = run.ends >= 0 if reached is None else reached
        if not run.stuck:
            break
        stuck = np.array(sorted(run.stuck.values()), dtype=np.int64)
        blocked += stuck.tolist()
        kept = ~(np.isin(consumer, stuck) & (run.ends[producer] < 0))
        producer, consumer, lag = producer[kept], consumer[kept], lag[kept]
    begun = run.ends - np.array(durations, dtype=np.float64)
    return Unfinished(Timeline(schedule, costs, begun, run.ends), tuple(blocked), reached)
