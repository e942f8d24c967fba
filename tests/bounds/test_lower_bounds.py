"""Promises of the bounds: known optima are respected, one machine's best order is what brute force finds."""

from __future__ import annotations

import itertools
import random

import pytest

import penstock
import penstock.cost.presets
from penstock import Costs, Placement, Schedule, StageGraph, simulate
from penstock.bounds import Workload, bounds, bounds_of, preemptive
from penstock.lowering import Offload, Pass, Policy, Recompute, lower
from penstock.simulation.comparison import compare
from tests.support.grids import examples, small

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
def test_the_greatest_bound_meets_every_known_optimum(p: int, m: int, limit: int) -> None:
    found = bounds(Workload(Placement.loop(p), m, UNITS), limit)
    assert [bound.seconds for bound in found] == sorted((bound.seconds for bound in found), reverse=True)
    assert len(found) == 5
    assert found[0].seconds == OPTIMA[p, m, limit]


@pytest.mark.parametrize(
    ("case", "name"),
    {(2, 4, 4): "warm-up and drain", (2, 4, 8): "one-machine", (4, 4, 8): "one-machine"}.items(),
)
def test_the_simplest_of_equal_bounds_binds(case: tuple[int, int, int], name: str) -> None:
    p, m, limit = case
    assert bounds(Workload(Placement.loop(p), m, UNITS), limit)[0].name == name


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
    work = Workload(Placement.loop(4), 64, Costs())
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
        found = {b.name: b.seconds for b in bounds(Workload(Placement.loop(stages), rng.randint(1, 8), costs))}
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
    assert [(row.name, row.makespan, row.bound_name, round(row.gap, 3)) for row in rows] == [
        ("1f1b", 33, "one-machine", 0),
        ("zb-h1", 27, "one-machine", 0),
        ("v-half", 26.5, "one-machine", 0.039),
    ]


MEMORY_PASSES: tuple[list[Pass], ...] = (
    [],
    [],
    [Recompute()],
    [Recompute(stages=(0,), policy=Policy(every=2))],
    [Offload(ahead=0)],
    [Offload(ahead=1, policy=Policy(every=2))],
    [Recompute(policy=Policy(every=2)), Offload(ahead=0)],
)


@pytest.mark.parametrize("objective", ["makespan", "span", "period"])
@pytest.mark.parametrize("name", [name for name in penstock.families() if name != "forward-only"])
@small(lambda objective: objective == "makespan")
def test_no_family_beats_a_bound_at_its_own_peak_of_memory(name: str, objective: str) -> None:
    rng = random.Random(name + objective)
    for _ in range(examples(40)):
        p, m = rng.randint(1, 5), rng.randint(1, 12)
        if name == "interleaved-1f1b":
            m = p * rng.randint(1, 3)
        schedule = lower(penstock.build(name, ranks=p, microbatches=m), rng.choice(MEMORY_PASSES))
        stages = schedule.num_stages
        held = tuple(rng.randint(1, 9) for _ in range(stages))
        costs = Costs(
            recompute=rng.choice([None, 0, 2]),
            checkpoint=tuple(rng.randint(0, each) for each in held),
            offloadable=rng.choice([None, tuple(rng.randint(0, each) for each in held)]),
            host_latency=rng.choice([0, 1]),
            host_bandwidth=rng.choice([None, 5]),
            forward=tuple(rng.randint(1, 9) for _ in range(stages)),
            backward_input=tuple(rng.randint(1, 9) for _ in range(stages)),
            backward_weight=tuple(rng.randint(0, 9) for _ in range(stages)),
            latency=rng.randint(0, 3),
            bandwidth=rng.choice([None, 2.0]),
            activation_message=rng.randint(0, 4),
            gradient_message=rng.randint(0, 4),
            launch_overhead=rng.choice([0, 0.5]),
            optimizer_step=rng.choice([0, 3]),
            activation=held,
            activation_freed_by_input=tuple(rng.randint(0, each) for each in held),
            parameters=rng.randint(0, 3),
            forward_all_to_all=tuple(rng.choice([0, 0, 3, 9]) for _ in range(stages)),
            backward_input_all_to_all=rng.choice([0, 5]),
            backward_weight_all_to_all=rng.choice([0, 0, 9]),
            overlap_factor=rng.choice([0, 0.5, 1, 1]),
        )
        timeline = simulate(schedule, costs, with_period=True)
        value = getattr(timeline, objective)
        for bound in bounds_of(schedule, costs, max(timeline.peak_memory), objective):
            assert bound.seconds <= value * (1 + 1e-9), (p, m, costs, bound)


def test_the_published_zb_h1_cannot_be_beaten_by_more_than_its_rounding() -> None:
    """At the memory of 1F1B, a rank must idle in the warm-up and in the drain: ZB-H1 idles hardly longer."""
    costs = penstock.cost.presets.preset("zb-h2304-p8-m24")
    limit = 8 * float(costs.per_stage("activation", 8)[0])
    bound = bounds(Workload(Placement.loop(8), 24, costs), limit, "span")[0]
    assert bound.name == "warm-up and drain"
    span = simulate(penstock.build("zb-h1", ranks=8, microbatches=24), costs).span
    assert bound.seconds <= span <= bound.seconds * 1.00001


def test_the_span_of_a_rank_is_no_less_than_what_is_done_on_another_in_between() -> None:
    """With the memory of two 1F1B, rank 0 waits for all F and I of the last rank: ZB-2p, as published."""
    costs = penstock.cost.presets.preset("zb-h2304-p8-m24")
    limit = 16 * float(costs.per_stage("activation", 8)[0])
    bound = bounds(Workload(Placement.loop(8), 24, costs), limit, "span")[0]
    assert bound.seconds == pytest.approx(1.152599, rel=1e-9)
    assert bound.because.startswith("rank 7's own work between the first and the last step of rank 0")


def test_pairs_of_a_fixed_length_do_not_beat_a_bound() -> None:
    rng = random.Random(3)
    for _ in range(60):
        schedule = penstock.build("dualpipev", ranks=rng.randint(1, 3), microbatches=rng.randint(4, 9))
        stages = schedule.num_stages
        costs = Costs(
            forward=tuple(rng.randint(0, 9) for _ in range(stages)),
            backward_input=tuple(rng.randint(0, 9) for _ in range(stages)),
            backward_weight=tuple(rng.randint(0, 9) for _ in range(stages)),
            backward=rng.choice([None, 10]),
            overlap=rng.choice([0, 0.5, 5]),
        )
        timeline = simulate(schedule, costs)
        for bound in bounds_of(schedule, costs, max(timeline.peak_memory)):
            assert bound.seconds <= timeline.makespan * (1 + 1e-9), (costs, bound)


def test_hidden_all_to_all_is_bounded_by_the_compute_that_hides_it() -> None:
    """One rank, pairs of F and B: the compute of all, and the all-to-all of the F and B at the ends."""
    schedule = Schedule.parse("0F0 (0F1;0B0)OVERLAP_F_B (0F2;0B1)OVERLAP_F_B 0B2")
    timeline = simulate(schedule, Costs(forward_all_to_all=1, backward_input_all_to_all=1))
    assert timeline.makespan == 2 + 3 + 3 + 3
    # the first F exposes its share of the 2 s before the first B, the last B of the 2 s after the last F
    assert timeline.bound.seconds == pytest.approx(9 + 1 / 2 * 2 + 1 / 3 * 2)
    # where all-to-all is longer, it is the stream that binds
    timeline = simulate(schedule, Costs(forward_all_to_all=5, backward_input_all_to_all=5))
    assert (timeline.makespan, timeline.bound.seconds) == (6 + 10 + 10 + 7, 30)


def test_all_to_all_of_recomputation_counts_once() -> None:
    """It is never hidden, so it is in the work of the rank, and not again in what the first F exposes."""
    schedule = Schedule.parse("0F0 0RECOMPUTE0 (0F1;0B0)OVERLAP_F_B 0RECOMPUTE1 0B1")
    timeline = simulate(schedule, Costs(forward_all_to_all=1))
    assert timeline.makespan == 2 + 2 + 3 + 2 + 2
    # compute of two F and two B, and two RECOMPUTE of two seconds
    assert timeline.bound.seconds == 2 + 4 + 4


# --- stage graphs -------------------------------------------------------------------------------------


TWO_SOURCES = StageGraph(4, ((0, 1), (1, 3), (2, 3)))
"""0 -> 1 -> 3 <- 2: stage 2 can wait until stage 3 needs it."""


@pytest.mark.parametrize("objective", ["span", "period"])
def test_a_rank_that_may_start_late_has_no_longer_span(objective: str) -> None:
    costs = Costs(forward=(10, 10, 1, 1), backward_weight=(0, 0, 30, 0))
    schedule = Schedule.parse("0F0 0I0 0W0 | 1F0 1I0 1W0 | 2F0 2I0 2W0 | 3F0 3I0 3W0", graph=TWO_SOURCES)
    bound = bounds_of(schedule, costs, objective=objective)[0]
    # stage 2 alone: F, F and I of stage 3, I, W; it need not wait for the long encoder
    assert bound.seconds == 1 + 1 + 1 + 1 + 30


def test_an_activation_is_held_no_longer_than_its_own_round_trip() -> None:
    costs = Costs(forward=(50, 50, 1, 1), backward_weight=0, activation=(1, 1, 3, 1))
    schedule = Schedule.parse("0F0 0B0 | 1F0 1B0 | 2F0 2B0 | 3F0 3B0", graph=TWO_SOURCES)
    residency = next(b for b in bounds_of(schedule, costs, 3, "span") if b.name == "residency")
    # rank 0 holds a third of its memory for 50 + 50 + 1 forward and 1 + 1 + 1 backward; rank 2 all for 4 only
    assert residency.seconds == pytest.approx(104 / 3)
    assert residency.because.startswith("rank 0")


def test_a_bound_of_no_seconds_proves_nothing_but_an_order_of_no_seconds() -> None:
    timeline = simulate(penstock.build("dualpipev", ranks=2, microbatches=4), Costs(overlap=0))
    assert (timeline.bound.seconds, timeline.makespan, timeline.gap) == (0, 18, float("inf"))
    assert timeline.bound.verdict(timeline.makespan).startswith("the gap is unknown: ")
    assert timeline.bound.verdict(0.0).startswith("proved optimal: ")
