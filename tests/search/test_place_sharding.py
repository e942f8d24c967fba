"""Promises of place-sharding: never slower than a look-ahead, never more gathers, never over the limit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

import penstock
from penstock import Costs, Kind, Schedule, ScheduleError, SearchError, SendModel, Timeline, lower, simulate
from penstock.lowering import AddCommunication, AddGradReduction, AddSharding
from penstock.lowering.sharding import with_reductions, with_sharding
from penstock.search import PlaceSharding
from penstock.search.passes import RankSteps, plan_rank
from tests.support.grids import repetitions, small
from tests.support.passes import after
from tests.support.random_costs import random_costs
from tests.support.random_schedules import random_compute

UP_AND_DOWN = "0F0 1F0 2F0 2B0 1B0 0B0"
COSTS = Costs(activation=0, unshard=1, unsharded_parameters=1, reduce_grad=0.5)


def gathers(schedule: Schedule) -> int:
    return int(schedule.table.of_kind(Kind.UNSHARD).sum())


def look_aheads(schedule: Schedule, costs: Costs) -> list[Timeline]:
    most = max(map(len, schedule.placement.stages_of_rank))
    passes = [AddSharding(count) for count in range(1, most + 1)]
    return [simulate(AddGradReduction()(each(schedule)), costs) for each in passes]


# --- text in, text out ------------------------------------------------------------------------------


def test_with_room_for_all_every_stage_is_gathered_once() -> None:
    assert after(PlaceSharding(COSTS), UP_AND_DOWN) == (
        "0UNSHARD 1UNSHARD 2UNSHARD 0F0 1F0 2F0 2B0 2REDUCE_GRAD 2RESHARD 1B0 1REDUCE_GRAD 1RESHARD 0B0 "
        "0REDUCE_GRAD 0RESHARD"
    )


def test_with_room_for_one_the_next_gather_comes_before_the_reduction() -> None:
    assert after(PlaceSharding(COSTS, memory_limit=1), UP_AND_DOWN) == (
        "0UNSHARD 0F0 0RESHARD 1UNSHARD 1F0 1RESHARD 2UNSHARD 2F0 2B0 2RESHARD 1UNSHARD 2REDUCE_GRAD 1B0 "
        "1RESHARD 0UNSHARD 1REDUCE_GRAD 0B0 0RESHARD 0REDUCE_GRAD"
    )


def test_memory_is_used_for_the_stages_that_fit() -> None:
    """Stage 0 is large: with room for it and a small one, three small stages are kept."""
    costs = replace(COSTS, unsharded_parameters=(3, 1, 1, 1), reduce_grad=0, unshard=0.1)
    schedule = Schedule.parse("0F0 1F0 2F0 3F0 3B0 2B0 1B0 0B0")
    assert str(PlaceSharding(costs, memory_limit=4)(schedule)) == (
        "0UNSHARD 1UNSHARD 0F0 0RESHARD 2UNSHARD 3UNSHARD 1F0 2F0 3F0 3B0 3RESHARD 3REDUCE_GRAD 2B0 2RESHARD "
        "0UNSHARD 2REDUCE_GRAD 1B0 1RESHARD 1REDUCE_GRAD 0B0 0RESHARD 0REDUCE_GRAD"
    )
    assert [gathers(each.schedule) for each in look_aheads(schedule, costs) if max(each.peak_memory) <= 4] == [
        7,
        6,
    ]


def test_a_forward_only_schedule_has_no_reductions() -> None:
    assert after(PlaceSharding(COSTS, memory_limit=1), "0F0 0F1 1F0 1F1") == (
        "0UNSHARD 0F0 0F1 0RESHARD 1UNSHARD 1F0 1F1 1RESHARD"
    )


def test_gathers_fall_as_memory_grows() -> None:
    schedule = lower(
        penstock.build("interleaved-1f1b", ranks=4, microbatches=16, stages_per_rank=4), [AddCommunication()]
    )
    costs = Costs(unshard=0.8, reduce_grad=1.5, unsharded_parameters=4)
    fixed = look_aheads(schedule, costs)
    assert [gathers(each.schedule) for each in fixed] == [320, 80, 56, 16]
    peaks = [max(each.peak_memory) for each in fixed]
    placed = [simulate(PlaceSharding(costs, peak)(schedule), costs) for peak in peaks]
    assert [gathers(each.schedule) for each in placed] == [214, 58, 30, 16]
    assert all(max(each.peak_memory) <= peak for each, peak in zip(placed, peaks))
    assert placed[0].makespan < 0.97 * fixed[0].makespan


# --- the plan of one rank ---------------------------------------------------------------------------


def steps(text: str, size: float = 1, gather: float = 0) -> RankSteps:
    """Steps of one second, each a letter for its stage."""
    stages = sorted(set(text))
    used = np.array([[letter == stage for letter in text] for stage in stages])
    start = np.arange(len(text), dtype=np.float64)
    return RankSteps(used, start, start + 1, [size] * len(stages), [gather] * len(stages))


def plan(text: str, room: float) -> list[str]:
    held = plan_rank(steps(text), np.full(len(text), float(room)))
    return ["".join("#" if each else "." for each in row) for row in held]


def test_the_farthest_next_use_is_evicted_and_gathered_again_as_early_as_there_is_room() -> None:
    assert plan("abcba", 2) == ["#..##", "####.", ".##.."]
    assert plan("abcba", 3) == ["#####", "####.", "###.."]


def test_every_order_of_equal_stages_is_gathered_as_seldom_as_possible() -> None:
    """Against the least number of gathers, by dynamic programming over the sets that are held."""
    rng = random.Random(0)
    for _ in range(60):
        text = "".join(rng.choice("abcd") for _ in range(rng.randint(1, 12)))
        for room in (1, 2, 3):
            held = plan_rank(steps(text), np.full(len(text), float(room)))
            assert (held.sum(axis=0) <= room).all()
            found = int(held[:, 0].sum() + (held[:, 1:] & ~held[:, :-1]).sum())
            assert found == fewest_gathers(text, room), (text, room)


def fewest_gathers(text: str, room: int) -> int:
    best = {frozenset[str](): 0}
    for letter in text:
        then: dict[frozenset[str], int] = {}
        for held, count in best.items():
            cost = count + (letter not in held)
            choices = (
                [held | {letter}] if len(held | {letter}) <= room else [held - {o} | {letter} for o in held]
            )
            for choice in choices:
                then[choice] = min(cost, then.get(choice, cost))
        best = then
    return min(best.values())


# --- the optimum -----------------------------------------------------------------------------------

TWO_STAGES = (
    "0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1",
    "0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1",
    "0F0 1F0 0F1 1B0 1F1 0B0 1B1 0B1",
)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("text", TWO_STAGES)
@pytest.mark.full
def test_two_stages_on_one_rank_are_placed_as_well_as_in_any_way(text: str, seed: int) -> None:
    rng = random.Random(f"{text} {seed}")
    schedule = Schedule.parse(text)
    costs = Costs(
        unshard=(rng.choice((0.3, 0.8, 2.5)), rng.choice((0.3, 1.5))),
        reduce_grad=rng.choice((0, 0.5, 2)),
        unsharded_parameters=(3, rng.choice((2, 3, 4))),
        activation=rng.choice((0, 1, 2)),
    )
    limit = max(look_aheads(schedule, costs)[0].peak_memory) + rng.choice((0, 1, 2))
    placed = simulate(PlaceSharding(costs, limit)(schedule), costs)
    best = min(
        (round(each.makespan, 9), gathers(each.schedule))
        for each in every_placement(schedule, costs)
        if max(each.peak_memory) <= limit
    )
    assert (round(placed.makespan, 9), gathers(placed.schedule)) <= best


def every_placement(schedule: Schedule, costs: Costs) -> Iterator[Timeline]:
    """Each stage unsharded in any of the steps that do not use it, if it is used next or has just been used."""
    own = [step.parts[0].stage for step in schedule.ranks[0]]
    for others in product((False, True), repeat=len(own)):
        held = np.array([[stage == each or other for each, other in zip(own, others)] for stage in (0, 1)])
        after = np.array([max(step for step, each in enumerate(own) if each == stage) for stage in (0, 1)])
        for later in range(len(own) - int(after.min())):
            reduced = with_reductions(schedule, np.minimum(after + later, len(own) - 1))
            is_compute = [step.parts[0].kind is not Kind.REDUCE_GRAD for step in reduced.ranks[0]]
            step_of_slot = np.cumsum([0, *is_compute])[:-1]
            ended = np.hstack((held, [[False], [False]]))
            placed = with_sharding(reduced, lambda _rank, _use, at=ended[:, step_of_slot]: at)  # type: ignore[misc]
            if not penstock.validate(placed):
                yield simulate(placed, costs)


# --- random trials ----------------------------------------------------------------------------------


def random_case(rng: random.Random) -> tuple[Schedule, Costs]:
    families = ["interleaved-1f1b", "looped-bfs", "zbv", "1f1b", "dualpipev"]
    schedule = random_compute(rng)
    if rng.random() < 0.5:
        schedule = penstock.build(rng.choice(families), ranks=rng.randint(1, 3), microbatches=rng.randint(1, 5))

    def some(*values: float) -> tuple[float, ...]:
        return tuple(rng.choice(values) for _ in range(schedule.num_stages))

    costs = replace(
        random_costs(rng, schedule.num_stages),
        unshard=some(0, 0.3, 1, 2),
        reshard=rng.choice((0, 0, 0.1)),
        reduce_grad=some(0, 1, 2),
        unsharded_parameters=some(0, 1, 3),
    )
    return lower(schedule, [AddCommunication()] if rng.random() < 0.7 else []), costs


@pytest.mark.parametrize("seed", range(12))
@small(lambda seed: seed == 0)
def test_random_schedules(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(repetitions(25, 10)):
        schedule, costs = random_case(rng)
        fixed = look_aheads(schedule, costs)
        peaks = [max(each.peak_memory) for each in fixed]
        limit = rng.choice((None, min(peaks), 0.9 * min(peaks), rng.uniform(min(peaks), max(peaks))))
        fitting = [each for each, peak in zip(fixed, peaks) if limit is None or peak <= limit]
        try:
            placed = simulate(PlaceSharding(costs, limit)(schedule), costs)
        except SearchError:
            assert not fitting
            continue
        assert limit is None or max(placed.peak_memory) <= limit * (1 + 1e-9)
        if fitting:
            best = min(fitting, key=lambda each: (round(each.makespan, 6), gathers(each.schedule)))
            assert placed.makespan <= best.makespan * (1 + 1e-9)
            assert gathers(placed.schedule) <= gathers(best.schedule)


def test_stage_graphs_are_placed_too() -> None:
    graph = penstock.encoder_decoder((2, 1), 5, feeds=(0, 2), mtp=True)
    schedule = lower(penstock.build("zb-h1", graph=graph, ranks=3, microbatches=4), [AddCommunication()])
    costs = Costs(unshard=1, unsharded_parameters=3, reduce_grad=0.5)
    fixed = look_aheads(schedule, costs)[1]
    placed = simulate(PlaceSharding(costs, max(fixed.peak_memory))(schedule), costs)
    assert max(placed.peak_memory) <= max(fixed.peak_memory)
    assert placed.makespan <= fixed.makespan
    assert gathers(placed.schedule) < gathers(fixed.schedule)


def test_it_places_for_the_given_send_model() -> None:
    schedule = lower(penstock.build("interleaved-1f1b", ranks=2, microbatches=4), [AddCommunication()])
    costs = Costs(unshard=1, latency=0.5, unsharded_parameters=1)
    model = SendModel.RENDEZVOUS
    placed = simulate(PlaceSharding(costs, 9, model)(schedule), costs, send_model=model)
    for count in (1, 2):
        fixed = simulate(AddGradReduction()(AddSharding(count)(schedule)), costs, send_model=model)
        assert max(fixed.peak_memory) > 9 or placed.makespan <= fixed.makespan


# --- errors -----------------------------------------------------------------------------------------


def test_what_cannot_fit_is_refused_with_rank_bytes_and_limit() -> None:
    schedule = penstock.build("interleaved-1f1b", ranks=2, microbatches=4)
    costs = Costs(unsharded_parameters=(10, 10, 10, 20), parameters=5)
    with pytest.raises(SearchError) as raised:
        PlaceSharding(costs, memory_limit=26)(schedule)
    assert str(raised.value) == (
        "no placement of UNSHARD and RESHARD fits the memory limit of 26 B per rank: rank 1 needs 33 B, even "
        "if only the stage in use is unsharded; raise the limit, or choose a schedule that holds fewer "
        "activations"
    )


@pytest.mark.parametrize("limit", [-1, float("nan"), "4GiB", True])
def test_a_limit_that_is_no_number_of_bytes_is_refused(limit: float) -> None:
    with pytest.raises(SearchError, match="memory_limit must be a number of bytes"):
        PlaceSharding(COSTS, limit)


def test_a_schedule_that_has_collectives_is_refused() -> None:
    with pytest.raises(ScheduleError, match="place-sharding: the schedule already has UNSHARD, RESHARD"):
        PlaceSharding(COSTS)(lower(penstock.build("1f1b", ranks=2, microbatches=2)))
