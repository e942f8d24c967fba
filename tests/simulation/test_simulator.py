"""Promises of the simulator: published numbers, closed forms, and laws that hold for any schedule and costs."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock import Action, Costs, CostsError, Overlap, Schedule, ScheduleError, simulate, validate
from penstock.bounds import bounds_of
from penstock.cost.presets import preset
from penstock.families import families
from penstock.ir.action import Step
from penstock.lowering import AddCommunication, DeferReceives
from penstock.simulation.simulator import Simulator
from penstock.validation import SendModel
from tests.support.grids import examples, small
from tests.support.random_costs import random_costs
from tests.support.random_schedules import random_valid

# hidden, p, m, then (makespan, span, rate by span) of 1F1B, ZB-H1 and ZB-H2, in microseconds, as published
PUBLISHED = [
    (2304, 8, 24, [(1456749, 1456749, 0.2431), (1310405, 1310405, 0.1585), (1236632, 1236632, 0.1083)]),
    (2304, 8, 32, [(1833838, 1833838, 0.1985), (1678164, 1678164, 0.1242), (1604083, 1604083, 0.0837)]),
    (2304, 8, 64, [(3357932, 3357932, 0.1240), (3154286, 3154286, 0.0674), (3078371, 3078371, 0.0444)]),
    (4096, 8, 24, [(2480217, 2480217, 0.2347), (2187537, 2187537, 0.1323), (2109851, 2040670, 0.0698)]),
    (4096, 8, 32, [(3110876, 3110876, 0.1898), (2814376, 2814376, 0.1045), (2732973, 2669588, 0.0559)]),
    (4096, 8, 64, [(5671364, 5671364, 0.1091), (5348572, 5348572, 0.0554), (5265706, 5205366, 0.0294)]),
]


PUBLISHED_V = [
    (4096, 16, 48, [(5036318, 5036318, 0.2668), (4362378, 4362378, 0.1536), (4148808, 4023798, 0.0823)]),
    (5120, 24, 72, [(3744180, 3744180, 0.2699), (3193138, 3193138, 0.1439), (3062015, 2916862, 0.0628)]),
    (6144, 32, 96, [(6945710, 6945710, 0.2676), (5934760, 5934760, 0.1429), (5700493, 5428406, 0.0629)]),
]


ROWS = [(f"zb-h{h}-p{p}-m{m}", p, m, rows) for h, p, m, rows in PUBLISHED]
ROWS += [(f"zbv-h{h}-p{p}-m{m}-whole", p, m, rows) for h, p, m, rows in PUBLISHED_V]


@pytest.mark.parametrize(("name", "p", "m", "rows"), ROWS)
def test_the_published_rows_are_reproduced_to_the_last_digit(
    name: str, p: int, m: int, rows: list[tuple[int, int, float]]
) -> None:
    for family, (makespan, span, rate) in zip(("1f1b", "zb-h1", "zb-h2"), rows, strict=True):
        timeline = simulate(penstock.build(family, ranks=p, microbatches=m), preset(name))
        assert round(timeline.makespan * 1e6) == makespan
        assert round(timeline.span * 1e6) == span
        assert round(timeline.bubble("span"), 4) == rate


# torch's ZBV order is not the one the V paper's heuristic found for these costs: twice better, once worse
@pytest.mark.parametrize(
    ("name", "p", "m", "published", "ours"),
    [
        ("zbv-h4096-p16-m48", 16, 48, 3969197, 3975626),
        ("zbv-h5120-p24-m72", 24, 72, 2919856, 2915260),
        ("zbv-h6144-p32-m96", 32, 96, 5407444, 5401104),
    ],
)
def test_zbv_is_within_two_thousandths_of_the_published_spans(
    name: str, p: int, m: int, published: int, ours: int
) -> None:
    timeline = simulate(penstock.build("zbv", ranks=p, microbatches=m), preset(name))
    assert round(timeline.span * 1e6) == ours
    assert abs(ours / published - 1) < 0.002


@pytest.mark.parametrize(
    ("name", "makespan", "idle", "peak"),
    [
        ("interleaved-1f1b", 57, 9, 11),
        ("looped-bfs", 57, 9, 16),
        ("interleaved-zero-bubble", 51, 3, 8),
        ("zbv", 51, 3, 8),
        ("dualpipev", 54, 6, 9),
    ],
)
def test_the_unit_cost_table(name: str, makespan: float, idle: float, peak: float) -> None:
    for schedule in (made := penstock.build(name, ranks=4, microbatches=8), penstock.lower(made)):
        timeline = simulate(schedule)
        assert (timeline.makespan, timeline.idle[0], max(timeline.peak_memory)) == (makespan, idle, peak)


def test_zero_bubble_means_the_period_is_the_work() -> None:
    timeline = simulate(penstock.build("zbv", ranks=4, microbatches=8), with_period=True)
    assert (timeline.makespan, timeline.span, timeline.period) == (51, 48, 48)
    assert (timeline.bubble("span"), timeline.bubble("period")) == (0, 0)


TINY = Schedule.parse("0F0 0B0 | 1F0 1B0")


def test_stages_may_cost_differently() -> None:
    assert simulate(TINY, Costs(forward=(1, 10), backward=(2, 20))).makespan == 33


def test_a_hop_costs_latency_and_the_time_of_its_bytes() -> None:
    costs = Costs(latency=0.5, bandwidth=10, activation_message=20, gradient_message=30)
    assert simulate(TINY, costs).makespan == 6 + 2 * 0.5 + 2 + 3


def test_neighbours_on_one_rank_pay_no_hop() -> None:
    assert (
        simulate(Schedule.parse("0F0 1F0"), Costs(latency=5, bandwidth=1, activation_message=9)).makespan == 2
    )


@pytest.mark.parametrize(("costs", "seconds"), [({}, 3), ({"overlap_factor": 0}, 2), ({"overlap": 7}, 7)])
def test_a_pair_costs_between_its_longer_part_and_the_sum_or_what_is_given(
    costs: dict[str, float], seconds: float
) -> None:
    pair = Schedule.parse("0F0 (0F1;0B0)OVERLAP_F_B 0B1")
    assert simulate(pair, Costs(**costs)).makespan == 1 + seconds + 2


def test_launching_costs_once_for_each_step() -> None:
    pair = Schedule.parse("0F0 (0F1;0B0)OVERLAP_F_B 0B1")
    assert simulate(pair, Costs(launch_overhead=0.5)).makespan == 6 + 1.5


def test_the_optimizer_step_counts_in_the_period_only() -> None:
    timeline = simulate(TINY, Costs(optimizer_step=10), with_period=True)
    assert (timeline.makespan, timeline.period) == (6, 16)


def test_channels_that_are_busy_after_the_last_step_count_in_the_period() -> None:
    schedule = penstock.build("forward-only", ranks=2, microbatches=1)
    costs = Costs(forward=1, bandwidth=1, activation_message=10)
    assert simulate(schedule, costs, with_period=True).period == 10


def repeated(schedule: Schedule, times: int) -> Schedule:
    """Every rank's list so many times in a row, each time with new microbatches."""

    def later(part: Action, iteration: int) -> Action:
        assert part.microbatch is not None
        return replace(part, microbatch=part.microbatch + iteration * schedule.microbatches)

    rows: list[list[Step]] = [[] for _ in schedule.ranks]
    for iteration in range(times):
        for row, steps in zip(rows, schedule.ranks):
            for step in steps:
                parts = [later(part, iteration) for part in step.parts]
                row.append(Overlap(*parts) if len(parts) > 1 else parts[0])
    return Schedule(rows, schedule.placement, times * schedule.microbatches)


@pytest.mark.parametrize("model", [None, *SendModel])
@pytest.mark.parametrize("name", families())
@small(lambda name, model: model is None or name in {"1f1b", "zbv", "dualpipev", "po-h"})
def test_the_period_is_what_iterations_take_back_to_back(name: str, model: SendModel | None) -> None:
    rng = random.Random(f"{name} {model}")
    for _ in range(examples(20)):
        ranks, microbatches = rng.randint(1, 4), rng.randint(1, 6)
        schedule = penstock.build(name, ranks=ranks, microbatches=microbatches)
        if model is not None:
            schedule = AddCommunication()(schedule)
        each = range(schedule.num_stages)
        costs = Costs(
            forward=tuple(rng.randint(0, 9) for _ in each),
            backward_input=tuple(rng.randint(0, 9) for _ in each),
            backward_weight=rng.randint(0, 5),
            latency=rng.choice((0, 1, 7)),
            bandwidth=rng.choice((None, 1, 3)),
            activation_message=rng.choice((0, 2, 10)),
            gradient_message=rng.choice((0, 2, 10)),
        )
        sends = model or SendModel.BUFFERED
        if validate(schedule, sends):
            continue
        period = simulate(schedule, costs, send_model=sends, with_period=True).period
        few, many = (simulate(repeated(schedule, n), costs, send_model=sends).makespan for n in (10, 20))
        assert period == pytest.approx((many - few) / 10)


def test_a_schedule_with_faults_is_refused_with_its_report() -> None:
    with pytest.raises(ScheduleError, match=r"error\[deadlock\]"):
        simulate(Schedule.parse("0F0 0B0 0F1 0B1 | 1F1 1B1 1F0 1B0"))
    hanging = DeferReceives(past_sends=True)(penstock.lower(penstock.build("1f1b", ranks=2, microbatches=4)))
    assert simulate(hanging, send_model="edge-streams").makespan == 15
    with pytest.raises(ScheduleError, match="under send model pair-streams or shared-stream"):
        simulate(hanging, send_model="shared-stream")


def test_lists_of_the_wrong_length_are_found_before_anything_is_run() -> None:
    with pytest.raises(CostsError, match="parameters: 3 entries, but the schedule has 2 stages"):
        simulate(TINY, Costs(parameters=(1, 2, 3)))


seeds = st.integers(min_value=0, max_value=2**32)


@settings(max_examples=examples(300), deadline=None)
@given(seeds)
def test_no_makespan_beats_any_bound(seed: int) -> None:
    rng = random.Random(seed)
    schedule = random_valid(rng)
    costs = random_costs(rng, schedule.num_stages)
    timeline = simulate(schedule, costs)
    limit = max(memory.activations.max() for memory in timeline.memory)
    for bound in bounds_of(schedule, costs, limit):
        assert bound.seconds <= timeline.makespan + 1e-9, bound


@settings(max_examples=examples(300), deadline=None)
@given(seeds)
def test_slower_costs_never_shorten_a_schedule(seed: int) -> None:
    rng = random.Random(seed)
    schedule = random_valid(rng)
    costs = random_costs(rng, schedule.num_stages)
    engine = Simulator(schedule, costs)
    usual = engine.run()
    engine.durations = np.array([d + rng.choice((0, 0, 1)) for d in engine.durations])
    late = engine.run()
    assert (late.end >= usual.end - 1e-9).all()


@settings(max_examples=examples(100), deadline=None)
@given(seeds)
def test_time_scales_with_its_unit(seed: int) -> None:
    rng = random.Random(seed)
    schedule = random_valid(rng)
    costs = random_costs(rng, schedule.num_stages)
    once, thrice = (simulate(schedule, c, with_period=True) for c in (costs, costs.scaled(3)))
    assert np.allclose(once.end * 3, thrice.end)
    assert once.period is not None
    assert thrice.period == pytest.approx(3 * once.period)


def test_costs_that_are_no_costs_are_reported() -> None:
    costs: Any = {"forward": 2}
    with pytest.raises(CostsError, match=r"costs must be Costs \(given {'forward': 2}\)"):
        simulate(penstock.build("1f1b", ranks=2, microbatches=2), costs)
