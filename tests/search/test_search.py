"""Promises of `penstock.search`: results are right, fit, are never below their bound, never above a family."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys

import numpy as np
import pytest

import penstock
from penstock import Costs, Placement, SearchError, lower, simulate, validate
from penstock.presets import preset
from penstock.search import Progress, SearchResult, search
from penstock.validation import MODELS
from tests.search.instances import UNITS, random_problem
from tests.test_bounds import OPTIMA

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
    """What holds of every result."""
    lowered = lower(found.schedule)
    assert all(not validate(schedule, sends) for schedule in (found.schedule, lowered) for sends in MODELS)
    timeline = simulate(found.schedule, costs)
    assert found.value == getattr(timeline, found.objective)
    if memory_limit is not None:
        assert max(timeline.peak_memory) <= memory_limit * (1 + 1e-9)
    assert found.bound.seconds <= found.value * (1 + 1e-9)
    assert found.proved == (found.gap == 0)
    assert all(found.value <= value * (1 + 1e-9) for value in found.families.values())


@pytest.mark.parametrize("objective", ["makespan", "span", "period"])
def test_every_result_is_right_fits_keeps_to_its_bound_and_loses_to_no_family(objective: str) -> None:
    rng = random.Random(objective)
    for _ in range(25):
        problem = random_problem(rng, objective)
        found = search(
            ranks=problem.placement.num_ranks,
            microbatches=problem.microbatches,
            costs=problem.costs,
            placement=problem.placement,
            memory_limit=problem.memory_limit,
            objective=objective,
            split=problem.split,
            moves=2000,
        )
        assert_sound(found, problem.costs, problem.memory_limit)


@pytest.mark.parametrize("kind", ["heavy last", "heavy first", "random"])
@pytest.mark.parametrize(("p", "v"), [(3, 1), (4, 2), (8, 1), (6, 2)])
def test_unequal_stages_get_at_least_as_good_as_every_family(p: int, v: int, kind: str) -> None:
    rng = random.Random(f"{kind}{p}{v}")
    forward = [rng.uniform(50, 150) if kind == "random" else 100.0 for _ in range(p * v)]
    forward[0] += 80.0 * (kind == "heavy first")
    forward[-1] += 80.0 * (kind == "heavy last")
    costs = Costs(
        forward=tuple(forward),
        backward_input=tuple(1.05 * each for each in forward),
        backward_weight=tuple(0.8 * each for each in forward),
        latency=5.0,
        activation=2,
        activation_freed_by_input=1,
    )
    for limit in (None, 2.0 * p * v):
        found = search(
            ranks=p, microbatches=4 * p, stages_per_rank=v, costs=costs, memory_limit=limit, moves=20_000
        )
        assert_sound(found, costs, limit)
        assert found.gap < 0.03
        assert found.families


@pytest.mark.parametrize(("p", "m", "limit"), OPTIMA)
def test_the_known_optima_are_found_and_proved(p: int, m: int, limit: int) -> None:
    found = search(ranks=p, microbatches=m, costs=UNITS, memory_limit=limit, seconds=60)
    assert (found.value, found.proved) == (OPTIMA[p, m, limit], True)
    assert_sound(found, UNITS, limit)


@pytest.mark.parametrize("name", PUBLISHED)
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
        seconds=60,
        told=stop_when_met,
    )
    assert twice.value * 1e6 <= PUBLISHED[name] + 0.5
    assert_sound(twice, costs, 16 * held)


def test_a_v_in_little_memory_beats_the_published_ones_at_their_own_limits() -> None:
    limits = {}
    for name in ("v-min", "v-half", "zbv"):
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
            moves=400_000,
        )
        assert_sound(found, CHUNKS, limit)
        assert found.value < makespan


def test_many_microbatches_keep_the_quality_of_few() -> None:
    """The steady state of a good order is repeated: the ends weigh less, and the gap falls."""
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
    assert gaps[1] < gaps[0]


def test_a_limit_of_activations_counts_those_that_are_alive() -> None:
    costs = Costs(activation=5e9, activation_freed_by_input=2e9, parameters=30e9)
    found = search(ranks=4, microbatches=8, costs=costs, live_limit=4, moves=1000)
    assert max(found.timeline.peak_memory) == 30e9 + 4 * 5e9
    assert found.value == simulate(penstock.build("zb-h1", ranks=4, microbatches=8)).makespan


def test_with_whole_backwards_nothing_is_split() -> None:
    found = search(ranks=4, microbatches=8, split=False, live_limit=4, moves=1000)
    assert not found.schedule.columns.has(penstock.Kind.I, penstock.Kind.W)
    assert (found.value, found.proved) == (33, True)


def test_a_backward_is_split_only_where_that_pays() -> None:
    """On real machines B takes less than I and W: few should be split, and the search finds which."""
    costs = Costs(forward=25, backward=42, backward_input=27, backward_weight=26)
    found = search(ranks=2, microbatches=4, costs=costs, moves=20_000)
    kinds = [step.parts[0].kind for row in found.schedule.ranks for step in row]
    assert kinds.count(penstock.Kind.B) > kinds.count(penstock.Kind.I) > 0
    assert found.value < simulate(penstock.build("1f1b", ranks=2, microbatches=4), costs).makespan


def test_of_any_placement_the_better_one_is_taken() -> None:
    ways = {
        way: search(
            ranks=3, microbatches=6, stages_per_rank=2, costs=CHUNKS, placement=way, live_limit=5, moves=5000
        )
        for way in ("loop", "v", "any")
    }
    assert ways["any"].value <= min(ways["loop"].value, ways["v"].value) * 1.01
    assert ways["any"].bound.seconds == min(ways["loop"].bound.seconds, ways["v"].bound.seconds)


def test_a_family_with_overlapped_pairs_that_pay_is_given_as_it_is() -> None:
    costs = Costs(overlap_factor=0.0)
    found = search(ranks=4, microbatches=16, stages_per_rank=2, placement="v", costs=costs, moves=1000)
    assert found.schedule.name == "dualpipev"
    assert_sound(found, costs, None)


@pytest.mark.parametrize("exact", [True, False])
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


def test_time_is_kept_and_progress_is_told() -> None:
    told: list[Progress] = []
    costs = CHUNKS
    search(ranks=2, microbatches=2, moves=10)  # compiled now
    found = search(
        ranks=8, microbatches=24, stages_per_rank=2, costs=costs, live_limit=10, seconds=1.5, told=told.append
    )
    assert 1.4 < found.seconds < 6
    assert found.value <= told[-1].best * (1 + 1e-9)
    assert [each.best for each in told[2:]] == sorted((each.best for each in told[2:]), reverse=True)
    assert [each.share for each in told] == sorted(each.share for each in told)
    assert all(each.bound <= each.best for each in told)


def test_the_time_is_kept_where_making_orders_alone_would_take_longer() -> None:
    search(ranks=2, microbatches=2, moves=10)  # compiled now
    found = search(ranks=64, microbatches=128, stages_per_rank=2, placement="loop", live_limit=128, seconds=1)
    assert found.seconds < 15


def test_a_key_press_keeps_the_best_so_far() -> None:
    def press(now: Progress) -> None:
        if now.doing == "moving steps":
            signal.raise_signal(signal.SIGINT)

    found = search(
        ranks=8, microbatches=24, stages_per_rank=2, costs=CHUNKS, live_limit=10, seconds=600, told=press
    )
    assert found.interrupted
    assert found.seconds < 60
    assert_sound(found, CHUNKS, None)


def test_noise_ranks_by_what_most_runs_stay_within() -> None:
    plain = search(ranks=4, microbatches=8, costs=UNITS, memory_limit=16, moves=5000)
    found = search(ranks=4, microbatches=8, costs=UNITS, memory_limit=16, moves=5000, noise=0.2, quantile=0.9)
    assert found.quantile is not None
    assert found.quantile > found.bound.seconds
    assert plain.quantile is None
    assert plain.value <= found.value
    spread = penstock.jitter.jitter(plain.schedule, UNITS, noise=0.2)
    assert found.quantile <= spread.quantile(0.9)


def test_a_limit_is_kept_beside_parameters_that_are_a_million_million_times_as_large() -> None:
    costs = Costs(parameters=1e12)
    found = search(ranks=4, microbatches=12, costs=costs, memory_limit=1e12 + 2, split=False, moves=100)
    assert_sound(found, costs, None)
    assert max(found.timeline.peak_memory) == 1e12 + 2


def test_pairs_that_take_no_time_prove_nothing() -> None:
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
def test_steps_of_hardly_any_or_no_length_can_be_searched(costs: Costs, objective: str) -> None:
    found = search(ranks=3, microbatches=5, costs=costs, memory_limit=2, objective=objective, moves=2000)
    assert_sound(found, costs, 2)


@pytest.mark.parametrize("lacking", ["ortools", "numba"])
def test_without_an_extra_the_rest_works_and_says_what_is_missing(lacking: str) -> None:
    code = f"""
import sys, json
from importlib.abc import MetaPathFinder
class Blocked(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == {lacking!r}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocked())
from penstock import search
found = search(ranks=3, microbatches=5, stages_per_rank=2, live_limit=4, moves=3000)
print(json.dumps([found.value, found.bound.seconds, found.missing]))
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)  # noqa: S603
    value, bound, missing = json.loads(done.stdout)
    assert bound <= value
    assert lacking in missing[0]


def test_it_runs_where_compiled_code_can_be_kept_nowhere() -> None:
    pytest.importorskip("numba", reason="compiled loops are an extra")
    code = """
from numba.core.caching import CacheImpl
CacheImpl._locator_classes = []
from penstock.search.kernel import W, compiled
print(compiled(lambda number: number + W)(3))
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)  # noqa: S603
    assert done.stdout == "5\n"


def test_it_says_so_where_numba_is_told_not_to_compile() -> None:
    code = "from penstock import search; print(search(ranks=2, microbatches=3, moves=100).missing)"
    command, env = [sys.executable, "-c", code], os.environ | {"NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=120)  # noqa: S603
    assert "numba" in done.stdout


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ranks": 0}, "ranks must be a whole number of at least 1 (given 0)"),
        ({"objective": "speed"}, "objective is one of makespan, span, period (given 'speed')"),
        ({"placement": "w"}, "placement is a Placement, or one of any, loop, v (given 'w')"),
        ({"placement": Placement.loop(3)}, "the placement has 3 ranks (given ranks=2)"),
        (
            {"memory_limit": 5, "live_limit": 5},
            "give memory_limit, in bytes, or live_limit, in activations, not both",
        ),
        ({"seconds": -1}, "seconds must be from 0 to 1e+18 (given -1)"),
        ({"seconds": 10**400}, "seconds must be from 0 to 1e+18 (given 1000"),
        ({"memory_limit": float("inf")}, "memory_limit must be from 0 to 1e+18 bytes (given inf)"),
        ({"memory_limit": "5"}, "memory_limit must be from 0 to 1e+18 bytes (given '5')"),
        ({"placement": [0, 1]}, "placement is a Placement, or one of any, loop, v (given [0, 1])"),
        ({"costs": "zb"}, "costs must be Costs (given 'zb')"),
        ({"noise": "a", "quantile": "b"}, "noise must be from 0 to 1 (given 'a'); quantile must be between"),
        ({"microbatches": 10**12}, "stages times microbatches can be at most 16777216 (given 2 stages, 1000"),
        ({"moves": 1.5}, "moves must be a whole number of at least 0 (given 1.5)"),
        ({"noise": 2, "quantile": 3}, "noise must be from 0 to 1 (given 2); quantile must be between 0 and 1"),
        ({"noise": 0.1, "objective": "span"}, "noise goes with makespan only (given 'span')"),
        (
            {"memory_limit": 3, "costs": Costs(parameters=(1, 3))},
            "nothing fits into 3 a rank: rank 1 needs 4, for what it always holds and one microbatch of each",
        ),
        (
            {"ranks": 0, "microbatches": 0},
            "ranks must be a whole number of at least 1 (given 0); microbatches must",
        ),
    ],
)
def test_what_cannot_be_searched_for_is_refused_with_all_faults(given: dict[str, object], message: str) -> None:
    with pytest.raises(SearchError) as caught:
        search(**({"ranks": 2, "microbatches": 4} | given))  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_more_activations_than_there_are_is_no_limit() -> None:
    assert search(ranks=2, microbatches=3, live_limit=10**400, moves=10).value == 10


def test_numbers_may_be_those_of_numpy() -> None:
    plain = search(ranks=2, microbatches=3, stages_per_rank=2, memory_limit=3.0, seed=4, moves=500)
    found = search(
        ranks=np.int64(2),  # type: ignore[arg-type]
        microbatches=np.int32(3),  # type: ignore[arg-type]
        stages_per_rank=np.int64(2),  # type: ignore[arg-type]
        memory_limit=np.float32(3),  # type: ignore[arg-type]
        seed=np.int64(4),  # type: ignore[arg-type]
        seconds=np.float32(1),  # type: ignore[arg-type]
        moves=np.int64(500),  # type: ignore[arg-type]
    )
    assert found.schedule == plain.schedule
    assert found.value == plain.value


def test_costs_for_another_number_of_stages_are_refused() -> None:
    with pytest.raises(penstock.CostsError, match="forward: it has 3 entries, but the schedule has 2 stages"):
        search(ranks=2, microbatches=4, costs=Costs(forward=(1, 2, 3)))
