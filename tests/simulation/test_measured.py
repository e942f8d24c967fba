"""Promise: measured times of steps give the times of messages, costs, and reasons for idle time."""

from __future__ import annotations

import numpy as np
import pytest

from penstock import Costs, Schedule, build, lower, simulate
from penstock.simulation.calibration import measured_timeline
from penstock.simulation.gaps import gaps
from penstock.simulation.timeline import Timeline

COSTS = Costs(forward=(1.0, 2.0), backward=(2.0, 3.0), latency=0.5)


def measured(timeline: Timeline) -> Timeline:
    """The same times, as if a clock had measured them."""
    return measured_timeline(timeline.schedule, np.stack((timeline.start, timeline.end), axis=1), Costs())


@pytest.mark.parametrize("level", ["compute", "lowered"])
def test_costs_reasons_and_arrivals_are_those_of_the_simulation(level: str) -> None:
    schedule = build("1f1b", ranks=2, microbatches=4)
    expected = simulate(schedule if level == "compute" else lower(schedule), COSTS)
    found = measured(expected)
    assert found.costs.per_stage("forward", 2) == pytest.approx([1, 2])
    assert found.costs.full_backward(2) == pytest.approx([2, 3])
    assert found.costs.per_edge("latency", 1) == pytest.approx([0.5])
    assert [str(gap) for gap in gaps(found)] == [str(gap) for gap in gaps(expected)]
    assert [message.arrival for message in found.messages] <= [
        found.start[message.consumer] for message in found.messages
    ]


def test_time_that_nothing_explains_is_overhead() -> None:
    schedule = Schedule.parse("0F0 0B0")
    found = measured_timeline(schedule, np.array([[0.0, 1.0], [1.5, 3.0]]), Costs())
    assert [(gap.reason, gap.length) for gap in gaps(found)] == [("overhead", 0.5)]
    assert found.costs.launch_overhead == pytest.approx(0.25)
    unsharded = Schedule.parse("0UNSHARD 0F0 0B0 0RESHARD 0REDUCE_GRAD")
    times = np.array([[0.0, 1.0], [1.0, 2.0], [2.0, 3.0], [3.0, 3.0], [3.0, 4.0]])
    assert gaps(measured_timeline(unsharded, times, Costs()))[0].reason == "unshard"
