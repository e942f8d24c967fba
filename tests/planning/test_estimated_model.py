"""An estimate that is fitted to one measured schedule predicts the steps of others within 10 %.

Stages sleep, so that cores do not matter; `python -m benchmarks.fit gpt` measures stages that compute. They
sleep for longer than there, so that what a busy machine adds to each action is a small part of it: estimates
have no constant part per action. The measured schedule runs twice in each round. If it does not take as long
both times, or its own costs do not predict it, other processes had the cores, and nothing can be said.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING
from unittest import mock

import pytest

pytest.importorskip("torch")

from benchmarks import fit, modules

import penstock
from penstock.cost.estimate import estimate
from penstock.cost.estimate.operations import Passes
from penstock.planning.estimated_model import even_blocks, stage_costs
from penstock.runtime import register_layer

if TYPE_CHECKING:
    from penstock.simulation.timeline import Timeline
    from tests.support.pool import Pools

NOISE, ERROR = 0.03, 0.10
SLEEP = 0.030
PREDICTED = ("gpipe", "zb-h1", "interleaved-1f1b", "interleaved-zero-bubble", "zbv")


def test_one_profile_of_a_simulated_machine_predicts_its_other_steps_exactly() -> None:
    own = fit.gpt_estimate()
    other = replace(own.device.attainable, passes=Passes(2.0, 3.0, 1.5), whole_backward=0.8)
    machine = estimate(own.config, own.parallel, replace(own.device, attainable=other))
    timelines = {}
    for name, schedule in fit.schedules(ranks=4).items():
        costs = stage_costs(machine, schedule.placement, even_blocks(machine, schedule.num_stages))
        timelines[name] = [penstock.simulate(schedule, replace(costs, latency=1e-4))]
    rows = fit.predictions(own, timelines)
    assert len(rows) >= 7
    assert [row.predicted for row in rows] == pytest.approx([row.measured for row in rows], rel=1e-9)


def _measured(part: str, rounds: int) -> dict[str, list[Timeline]]:
    register_layer(modules.Sleeping, modules.SleepingRule())
    with mock.patch.multiple(fit, SLEEP=SLEEP, PREDICTED=PREDICTED):
        return fit.measured(part, rounds)


@pytest.mark.full  # it waits for stages that sleep
def test_one_profile_predicts_the_steps_of_other_schedules(pools: Pools) -> None:
    for attempt in range(1, 4):
        timelines = pools(fit.PARTS["sleep"][0]).run(_measured, "sleep", 2 * attempt)[0]
        rows = {each.name: each for each in fit.predictions(fit.gpt_estimate(), timelines)}
        own, again = rows.pop(fit.MEASURED), rows.pop(fit.CONTROL)
        noise = max(abs(again.measured / own.measured - 1), abs(own.error))
        assert set(rows) == set(PREDICTED)
        wrong = {each.name: round(each.error, 3) for each in rows.values() if abs(each.error) > ERROR}
        if noise < NOISE and not wrong:
            return
    if noise >= NOISE:
        pytest.skip(f"this machine is too busy: the same steps differ by {noise:.0%}")
    assert wrong == {}
