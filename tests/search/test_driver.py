"""Results of a search are valid, fit, respect their bound, and are no worse than any family."""

from __future__ import annotations

import random
import signal

import pytest
from benchmarks.search import unequal

import penstock
from penstock import Costs, lower, simulate, validate
from penstock.cost.presets import preset
from penstock.search import Progress, SearchResult, search
from penstock.simulation.jitter import simulate_with_jitter
from penstock.validation import SendModel
from tests.bounds.test_lower_bounds import OPTIMA
from tests.support.grids import examples, small, thinned
from tests.support.search_instances import UNITS, random_problem, search_for
from tests.support.slowness import slowness

PUBLISHED = {  # ZB-2p: the span at twice the memory of 1F1B, in microseconds
    "zb-h2304-p8-m24": 1152599,
    "zb-h2304-p8-m32": 1475535,
    "zb-h2304-p8-m64": 2949221,
    "zb-h4096-p8-m24": 1903596,
    "zb-h4096-p8-m32": 2525780,
    "zb-h4096-p8-m64": 5057708,
}
CHUNKS = Costs(forward=4959, backward_input=5217, backward_weight=3519, latency=213, activation=1)


def assert_sound(found: SearchResult, costs: Costs, memory_limit: float | None) -> None:
    """Properties of every result."""
    lowered = lower(found.schedule)
    assert all(not validate(schedule, sends) for schedule in (found.schedule, lowered) for sends in SendModel)
    timeline = simulate(found.schedule, costs, with_period=True)
    assert found.value == getattr(timeline, found.objective)
    if memory_limit is not None:
        assert max(timeline.peak_memory) <= memory_limit * (1 + 1e-9)
    assert found.bound.seconds <= found.value * (1 + 1e-9)
    assert found.proved == (found.gap == 0)
    assert all(found.value <= value * (1 + 1e-9) for value in found.families.values())


@pytest.mark.parametrize("objective", ["makespan", "span", "period"])
def test_every_result_is_valid_fits_respects_its_bound_and_no_family_is_better(objective: str) -> None:
    rng = random.Random(objective)
    for _ in range(examples(50)):
        problem = random_problem(rng, objective)
        found = search_for(problem, moves=2000)
        assert_sound(found, problem.costs, problem.memory_limit)


@pytest.mark.parametrize("kind", ["heavy last", "heavy first", "random"])
@pytest.mark.parametrize(("p", "v"), [(3, 1), (4, 2), (8, 1), (6, 2)])
@small(lambda p, kind: p == 3 or (p < 6 and kind == "random"))
def test_no_family_is_better_for_unequal_stages(p: int, v: int, kind: str) -> None:
    costs = unequal(kind, p * v, seed=p * v)
    for limit in (None, 2.0 * p * v):
        found = search(
            ranks=p, microbatches=4 * p, stages_per_rank=v, costs=costs, memory_limit=limit, moves=20_000
        )
        assert_sound(found, costs, limit)
        assert found.gap < 0.03
        assert found.families


@pytest.mark.parametrize(("p", "m", "limit"), OPTIMA)
@small(lambda p, m: p < 4 and m == 4)  # one of each number of ranks that is solved in a second
def test_the_known_optima_are_found_and_proved(p: int, m: int, limit: int) -> None:
    found = search(ranks=p, microbatches=m, costs=UNITS, memory_limit=limit, seconds=60)
    assert (found.value, found.proved) == (OPTIMA[p, m, limit], True)
    assert_sound(found, UNITS, limit)


@pytest.mark.parametrize("name", PUBLISHED)
@small(lambda name: name.startswith("zb-h4096") and name.endswith("m24"))
def test_zb_1p_is_proved_best_and_zb_2p_is_not_longer_than_published(name: str) -> None:
    costs, m = preset(name), int(name.rpartition("m")[2])
    held = costs.per_stage("activation", 8)[0]
    once = search(ranks=8, microbatches=m, costs=costs, memory_limit=8 * held, objective="span", moves=1000)
    family = simulate(penstock.build("zb-h1", ranks=8, microbatches=m), costs).span
    assert once.value <= family * (1 + 1e-12)
    assert once.gap < 1e-5

    def stop_when_met(now: Progress) -> None:
        if now.best * 1e6 <= PUBLISHED[name] + 0.5:
            raise KeyboardInterrupt

    twice = search(
        ranks=8,
        microbatches=m,
        costs=costs,
        memory_limit=16 * held,
        objective="span",
        seconds=600,  # it ends when the published span is met
        on_progress=stop_when_met,
    )
    assert twice.value * 1e6 <= PUBLISHED[name] + 0.5
    assert_sound(twice, costs, 16 * held)


@pytest.mark.full
def test_a_v_in_little_memory_beats_the_published_schedules_at_their_limits() -> None:
    limits = {}
    for name in thinned(("v-half", "v-min", "zbv"), 3):
        timeline = simulate(penstock.build(name, ranks=8, microbatches=24), CHUNKS)
        limits[max(timeline.peak_memory)] = timeline.makespan
    for limit, makespan in limits.items():
        found = search(
            ranks=8,
            microbatches=24,
            stages_per_rank=2,
            placement="v",
            costs=CHUNKS,
            memory_limit=limit,
            moves=100_000,
        )
        assert_sound(found, CHUNKS, limit)
        assert found.value < makespan


def test_many_microbatches_keep_the_quality_of_few() -> None:
    """Warm-up and drain matter less."""
    gaps = [
        search(
            ranks=4,
            microbatches=m,
            stages_per_rank=2,
            placement="v",
            costs=CHUNKS,
            live_limit=6,
            moves=60_000,
        ).gap
        for m in (12, 96)
    ]
    assert gaps[1] <= gaps[0] < 0.01


def test_a_live_limit_counts_live_activations() -> None:
    costs = Costs(activation=5e9, activation_freed_by_input=2e9, parameters=30e9)
    found = search(ranks=4, microbatches=8, costs=costs, live_limit=4, moves=1000)
    assert max(found.timeline.peak_memory) == 30e9 + 4 * 5e9
    assert found.value == simulate(penstock.build("zb-h1", ranks=4, microbatches=8)).makespan


def test_without_split_there_is_no_input_or_weight_gradient_step() -> None:
    found = search(ranks=4, microbatches=8, split=False, live_limit=4, moves=1000)
    assert not found.schedule.table.has(penstock.Kind.I, penstock.Kind.W)
    assert (found.value, found.proved) == (33, True)


def test_a_backward_is_split_only_where_that_pays() -> None:
    """On real machines B takes less time than I and W: few should be split, and the search finds which."""
    costs = Costs(forward=25, backward=42, backward_input=27, backward_weight=26)
    found = search(ranks=2, microbatches=4, costs=costs, moves=20_000)
    kinds = [step.parts[0].kind for row in found.schedule.ranks for step in row]
    assert kinds.count(penstock.Kind.B) > kinds.count(penstock.Kind.I) > 0
    assert found.value < simulate(penstock.build("1f1b", ranks=2, microbatches=4), costs).makespan


def test_any_takes_the_better_placement() -> None:
    found = {
        name: search(
            ranks=3, microbatches=6, stages_per_rank=2, costs=CHUNKS, placement=name, live_limit=5, moves=5000
        )
        for name in ("loop", "v", "any")
    }
    assert found["any"].value <= min(found["loop"].value, found["v"].value) * 1.01
    assert found["any"].bound.seconds == min(found["loop"].bound.seconds, found["v"].bound.seconds)


def test_a_family_with_overlapped_pairs_that_pay_is_returned_unchanged() -> None:
    costs = Costs(overlap_factor=0.0)
    found = search(ranks=4, microbatches=16, stages_per_rank=2, placement="v", costs=costs, moves=1000)
    assert found.schedule.name == "dualpipev"
    assert_sound(found, costs, None)


@pytest.mark.parametrize("exact", [True, False])
@small(lambda exact: exact)
def test_the_same_seed_and_moves_give_the_same_schedule(exact: bool) -> None:  # noqa: FBT001
    m = 6 if exact else 24
    first, second, other = (
        search(
            ranks=4,
            microbatches=m,
            stages_per_rank=2,
            placement="v",
            costs=CHUNKS,
            live_limit=5,
            moves=30_000,
            seed=seed,
        )
        for seed in (1, 1, 2)
    )
    assert first.schedule == second.schedule
    assert (first.value, first.bound, first.found_by) == (second.value, second.bound, second.found_by)
    assert other.value > 0


def test_the_time_limit_holds_and_progress_is_reported() -> None:
    reports: list[Progress] = []
    costs = CHUNKS
    found = search(
        ranks=8,
        microbatches=24,
        stages_per_rank=2,
        costs=costs,
        live_limit=13,
        seconds=1.5,
        on_progress=reports.append,
    )
    assert 0.75 < found.seconds < 6 * slowness()  # a slow machine reserves more of it for the result
    assert found.value <= reports[-1].best * (1 + 1e-9)
    assert [each.best for each in reports[2:]] == sorted((each.best for each in reports[2:]), reverse=True)
    assert [each.fraction for each in reports] == sorted(each.fraction for each in reports)
    assert all(each.bound <= each.best for each in reports)


def test_the_time_limit_holds_where_list_scheduling_alone_would_take_longer() -> None:
    found = search(ranks=64, microbatches=128, stages_per_rank=2, placement="loop", live_limit=128, seconds=1)
    assert found.seconds < 15 * slowness()


def test_families_that_the_time_limit_leaves_no_time_for_are_named() -> None:
    free = search(ranks=4, microbatches=8, stages_per_rank=2, moves=0)
    found = search(ranks=4, microbatches=8, stages_per_rank=2, seconds=0)
    assert not free.skipped
    assert found.skipped
    assert len(found.families) == 2  # one for each placement
    assert set(free.families) <= {*found.families, *found.skipped}
    assert_sound(found, Costs(), None)


def test_ctrl_c_returns_the_best_so_far() -> None:
    def press(now: Progress) -> None:
        if now.phase == "annealing":
            signal.raise_signal(signal.SIGINT)

    found = search(
        ranks=8, microbatches=24, stages_per_rank=2, costs=CHUNKS, live_limit=13, seconds=600, on_progress=press
    )
    assert found.interrupted
    assert found.seconds < 60
    assert_sound(found, CHUNKS, None)


def test_jitter_ranks_by_the_quantile() -> None:
    plain = search(ranks=4, microbatches=8, costs=UNITS, memory_limit=16, moves=5000)
    found = search(ranks=4, microbatches=8, costs=UNITS, memory_limit=16, moves=5000, jitter=0.2, quantile=0.9)
    assert found.quantile is not None
    assert found.quantile > found.bound.seconds
    assert plain.quantile is None
    assert plain.value <= found.value
    spread = simulate_with_jitter(plain.schedule, UNITS, jitter=0.2)
    assert found.quantile <= spread.quantile(0.9)


def test_a_limit_holds_beside_parameters_that_are_1e12_times_as_large() -> None:
    costs = Costs(parameters=1e12)
    found = search(ranks=4, microbatches=12, costs=costs, memory_limit=1e12 + 2, split=False, moves=100)
    assert_sound(found, costs, None)
    assert max(found.timeline.peak_memory) == 1e12 + 2


def test_pairs_that_take_no_time_prove_no_optimum() -> None:
    costs = Costs(overlap=0)
    found = search(ranks=2, microbatches=4, stages_per_rank=2, placement="v", costs=costs, moves=100)
    assert found.value > 0
    assert found.bound.seconds == 0
    assert not found.proved


@pytest.mark.parametrize("objective", ["makespan", "span", "period"])
@pytest.mark.parametrize(
    "costs",
    [
        Costs(forward=0, backward_input=0, backward_weight=0),
        Costs(forward=0, backward_input=0, backward_weight=0, latency=3, activation_freed_by_input=1),
        Costs(forward=1e-18, backward_input=0, backward_weight=0, latency=1e18),
        Costs(forward=2e-10, backward_input=3e-10, backward_weight=1e-10, latency=2e-10),
    ],
)
def test_steps_of_tiny_or_zero_duration_can_be_searched(costs: Costs, objective: str) -> None:
    found = search(ranks=3, microbatches=5, costs=costs, memory_limit=2, objective=objective, moves=2000)
    assert_sound(found, costs, 2)
