"""Promises of the bounds: known optima are respected, one machine's best order is what brute force finds."""

from __future__ import annotations

import itertools
import random

import pytest

import penstock
from penstock import Costs, Placement, simulate
from penstock.bounds import Work, bounds, bounds_of, preemptive
from penstock.comparison import compare

UNITS = Costs(
    forward=10, backward_input=10, backward_weight=8, latency=1, activation=2, activation_freed_by_input=1
)
# ranks, microbatches, limit: the least makespan there is, proved elsewhere by an exact solver
OPTIMA = {
    (2, 4, 4): 128,
    (2, 4, 8): 123,
    (3, 4, 6): 144,
    (3, 4, 12): 134,
    (4, 4, 8): 154,
    (3, 6, 6): 200,
    (4, 6, 8): 216,
    (4, 6, 16): 201,
    (4, 8, 8): 272,
}


@pytest.mark.parametrize(("p", "m", "limit"), OPTIMA)
def test_no_bound_is_above_a_known_optimum(p: int, m: int, limit: int) -> None:
    found = bounds(Work(Placement.loop(p), m, UNITS), limit)
    assert [bound.name for bound in sorted(found, reverse=True)] == [bound.name for bound in found]
    assert len(found) == 5
    assert OPTIMA[p, m, limit] * 0.9 < found[0].seconds <= OPTIMA[p, m, limit]


@pytest.mark.parametrize(("case", "name"), {(2, 4, 8): "warm-up", (4, 4, 8): "one-machine"}.items())
def test_some_optima_are_met_by_the_bound_that_binds(case: tuple[int, int, int], name: str) -> None:
    p, m, limit = case
    best = bounds(Work(Placement.loop(p), m, UNITS), limit)[0]
    assert (best.seconds, best.name) == (OPTIMA[case], name)


def test_1f1b_is_proved_optimal_for_whole_backwards_and_free_hops() -> None:
    for p, m in itertools.product((1, 2, 4, 8), (1, 4, 8)):
        schedule = penstock.build("1f1b", ranks=p, microbatches=m)
        timeline = simulate(schedule)
        assert timeline.bound.seconds == timeline.makespan
        assert timeline.gap == 0


@pytest.mark.parametrize(
    ("costs", "m"),
    [
        (Costs(forward=(0.1, 10), backward=(100, 10), launch_overhead=1), 5),
        (Costs(forward=(1, 10), backward=(100, 10), activation=0.7), 3),
        (Costs(forward=(1, 10), backward=(100, 10), activation=0.1), 3),
    ],
)
def test_warm_up_counts_launching_and_does_not_lose_room_to_rounding(costs: Costs, m: int) -> None:
    first = [f"0F{k}" for k in range(m)] + [f"0B{k}" for k in range(m)]
    schedule = penstock.Schedule([first, [f"1{kind}{k}" for k in range(m) for kind in "FB"]])
    timeline = simulate(schedule, costs)
    for bound in bounds_of(schedule, costs, max(timeline.peak_memory)):
        assert bound.seconds <= timeline.makespan + 1e-9


def test_a_tight_memory_limit_binds() -> None:
    work = Work(Placement.loop(4), 64, Costs())
    assert bounds(work, 1)[0].name == "residency"
    assert bounds(work, 1)[0].seconds > bounds(work)[0].seconds


def test_one_machine_is_never_below_load() -> None:
    rng = random.Random(1)
    for _ in range(200):
        stages = rng.randint(1, 6)
        costs = Costs(
            forward=tuple(rng.randint(1, 9) for _ in range(stages)),
            backward_input=tuple(rng.randint(1, 9) for _ in range(stages)),
            backward_weight=tuple(rng.randint(1, 9) for _ in range(stages)),
            latency=rng.randint(0, 3),
        )
        found = {b.name: b.seconds for b in bounds(Work(Placement.loop(stages), rng.randint(1, 8), costs))}
        assert found["one-machine"] >= found["load"]


def test_jacksons_rule_finds_the_best_preemptive_order_of_unit_jobs() -> None:
    """With unit jobs and whole heads, nothing is gained by stopping a job, so all orders can be tried."""
    rng = random.Random(2)
    for _ in range(100):
        jobs = [(rng.randint(0, 4), 1, rng.randint(0, 5)) for _ in range(rng.randint(1, 5))]
        best = min(length(order) for order in itertools.permutations(jobs))
        assert preemptive(jobs) == best


def length(order: tuple[tuple[int, int, int], ...]) -> float:
    now, latest = 0, 0
    for head, seconds, tail in order:
        now = max(now, head) + seconds
        latest = max(latest, now + tail)
    return latest


def test_each_row_of_a_comparison_has_its_gap_and_the_bound_that_binds() -> None:
    rows = compare(*(penstock.build(name, ranks=4, microbatches=8) for name in ("1f1b", "zb-h1", "v-half")))
    assert [(row.name, row.makespan, row.binding, round(row.gap, 3)) for row in rows] == [
        ("1f1b", 33, "one-machine", 0),
        ("zb-h1", 27, "one-machine", 0),
        ("v-half", 53, "one-machine", 0.039),
    ]
