"""Promises of a search with memory policies: within the limit, as good as all choices and as every policy."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product

import pytest

from penstock import Costs, Kind, Placement, Schedule, SearchError, build, simulate, validate
from penstock.bounds import Workload, least_needed
from penstock.lowering import Offload, Policy, Recompute
from penstock.search import SearchResult, search
from penstock.search.driver import PolicyMoves
from tests.support.grids import small, thinned

COSTS = Costs(activation=10, checkpoint=1, host_bandwidth=8, activation_freed_by_input=6)


def peak(found: SearchResult) -> float:
    assert validate(found.schedule) == []
    return max(found.timeline.peak_memory)


# --- all choices -----------------------------------------------------------------------------------


def rows(stages: tuple[int, ...], m: int) -> Iterator[list[str]]:
    """Every order of the forwards and backwards of a rank, microbatches of a stage in ascending order."""

    def extend(done: dict[tuple[int, str], int], row: list[str]) -> Iterator[list[str]]:
        if len(row) == 2 * m * len(stages):
            yield row
        for stage, kind in product(stages, "FB"):
            k = done.get((stage, kind), 0)
            if k < (m if kind == "F" else done.get((stage, "F"), 0)):
                yield from extend({**done, (stage, kind): k + 1}, [*row, f"{stage}{kind}{k}"])

    yield from extend({}, [])


def choices(row: list[str], *, offload: bool) -> Iterator[list[str]]:
    """A rank's order with every choice of recomputed, or offloaded and recomputed, microbatches."""
    forwards = [step for step in row if "F" in step]
    options = ("", "R", "O", "RO") if offload else ("", "R")
    for chosen in product(options, repeat=len(forwards)):
        by = {step.replace("F", "B"): choice for step, choice in zip(forwards, chosen, strict=True)}
        made: list[str] = []
        for step in row:
            choice = by.get(step, "")
            made += [step.replace("B", "RELOAD")] if "O" in choice else []
            made += [step.replace("B", "RECOMPUTE")] if "R" in choice else []
            made.append(step)
            if "F" in step and "O" in by[step.replace("F", "B")]:
                made.append(step.replace("F", "OFFLOAD"))
        yield made


def brute_force(placement: Placement, m: int, costs: Costs, *, offload: bool) -> list[tuple[float, float]]:
    """Peak memory and makespan of every order with every memory policy."""
    found = []
    every = [[*rows(own, m)] for own in placement.stages_of_rank]
    for orders in product(*every):
        if validate(Schedule(list(orders), placement, m)):
            continue
        for made in product(*([*choices(row, offload=offload)] for row in orders)):
            timeline = simulate(Schedule(list(made), placement, m), costs)
            found.append((max(timeline.peak_memory), timeline.makespan))
    return found


@pytest.mark.parametrize(("m", "offload"), [(2, False), (2, True), (3, False)])
@small(lambda m, offload: m == 2 and not offload)
def test_it_is_as_fast_as_the_best_of_all_orders_and_choices(m: int, offload: bool) -> None:  # noqa: FBT001
    costs = Costs(forward=(1, 2), activation=4, checkpoint=1)
    every = brute_force(Placement.loop(2), m, costs, offload=offload)
    for limit in thinned(sorted({peak for peak, _ in every})[:: 1 if m == 2 else 3], 3):
        best = min(time for peak, time in every if peak <= limit)
        found = search(
            ranks=2,
            microbatches=m,
            costs=costs,
            memory_limit=limit,
            split=False,
            recompute=True,
            offload=offload,
            moves=20_000,
        )
        assert peak(found) <= limit
        assert not found.schedule.table.has(Kind.I)
        assert found.bound.seconds <= found.value <= best


@pytest.mark.parametrize(("m", "offload"), [(2, False), (1, True)])
def test_no_order_and_no_choice_holds_less_than_the_least_needed(m: int, offload: bool) -> None:  # noqa: FBT001
    costs = Costs(activation=(4, 6), checkpoint=(1, 2), offloadable=(3, 6), parameters=7)
    placement = Placement((0, 0))
    work = Workload(placement, m, costs, may_recompute=True, may_offload=offload)
    least = min(peak for peak, _ in brute_force(placement, m, costs, offload=offload))
    assert [least] == least_needed(work)


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize(("recompute", "offload"), [(True, False), (False, True), (True, True)])
@small(lambda p, recompute, offload: p == 2 and recompute and offload)
def test_something_is_found_wherever_anything_fits(p: int, recompute: bool, offload: bool) -> None:  # noqa: FBT001
    for v, m in product((1, 2), (1, 4)):
        n = p * v
        costs = Costs(activation=tuple(range(5, 5 + n)), checkpoint=2, parameters=3)
        for style in (Placement.loop(p, v), Placement.v(p, v)):
            work = Workload(style, m, costs, may_recompute=recompute, may_offload=offload)
            limit = max(least_needed(work))
            sizes = {"ranks": p, "microbatches": m, "placement": style, "costs": costs, "seconds": 0}
            policy = {"recompute": recompute, "offload": offload}
            assert peak(search(memory_limit=limit, **sizes, **policy)) <= limit  # type: ignore[arg-type]
            with pytest.raises(SearchError, match=r"whatever is recomputed or offloaded"):
                search(memory_limit=limit - 0.5, **sizes, **policy)  # type: ignore[arg-type]


# --- policies --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("p", "m", "v"), [(2, 3, 1), (3, 4, 1), (2, 3, 2)])
@pytest.mark.full
def test_it_is_never_slower_than_a_family_with_a_uniform_policy(p: int, m: int, v: int) -> None:
    families = ["1f1b", "gpipe", "zb-h1", "eager-1f1b"] if v == 1 else ["interleaved-1f1b", "gis", "zbv"]
    passes = [Recompute(), Recompute(policy=Policy(every=2)), Recompute((0,)), Offload(), Offload(ahead=2)]
    policies = []
    for name, each in product(families, passes):
        timeline = simulate(each(build(name, ranks=p, microbatches=m, stages_per_rank=v)), COSTS)
        policies.append((max(timeline.peak_memory), timeline.makespan))
    for limit in (15, 30) if v == 1 else (25,):
        found = search(
            ranks=p,
            microbatches=m,
            stages_per_rank=v,
            costs=COSTS,
            memory_limit=limit,
            recompute=True,
            offload=True,
            moves=0,
        )
        assert peak(found) <= limit
        assert found.bound.seconds <= found.value
        assert all(found.value <= time + 1e-9 for peak, time in policies if peak <= limit)


def test_memory_policies_make_a_schedule_faster_than_orders_that_fit_alone() -> None:
    sizes = {"ranks": 2, "microbatches": 4, "costs": COSTS, "memory_limit": 12, "moves": 20_000}
    plain, chosen = search(**sizes), search(recompute=True, **sizes)  # type: ignore[arg-type]
    assert chosen.value < plain.value
    assert "RECOMPUTE" in chosen.found_by
    assert peak(chosen) <= 12


@pytest.mark.parametrize("activation", [2, (2, 0, 1), 0])
def test_a_checkpoint_of_no_bytes_leaves_all_memory_free(activation: float | tuple[float, ...]) -> None:
    costs = Costs(
        forward=(5, 2, 1),
        backward_input=(9, 9, 4),
        backward_weight=(2, 9, 2),
        activation=activation,
        checkpoint=0,
    )
    for limit in (2, 4):
        found = search(ranks=3, microbatches=3, costs=costs, memory_limit=limit, recompute=True, moves=4000)
        assert peak(found) <= limit
        assert found.bound.seconds <= found.value


def test_a_limit_that_the_family_fits_needs_no_memory_policy() -> None:
    found = search(ranks=3, microbatches=6, costs=COSTS, memory_limit=1000, recompute=True, offload=True)
    assert not found.schedule.table.has(Kind.RECOMPUTE, Kind.OFFLOAD)
    assert found.proved


@pytest.mark.parametrize("objective", ["span", "period"])
@small(lambda objective: objective == "period")
def test_other_objectives_and_jitter(objective: str) -> None:
    sizes = {"ranks": 2, "microbatches": 3, "costs": COSTS, "memory_limit": 12, "recompute": True}
    found = search(objective=objective, moves=2_000, **sizes)  # type: ignore[arg-type]
    assert peak(found) <= 12
    assert found.bound.seconds <= found.value == getattr(found.timeline, objective)
    jittered = search(jitter=0.1, moves=2_000, **sizes)  # type: ignore[arg-type]
    assert jittered.quantile is not None
    assert jittered.quantile >= jittered.value


def test_memory_policies_need_a_limit_in_bytes() -> None:
    for live_limit in (None, 3):
        with pytest.raises(SearchError, match="recompute and offload need memory_limit, in bytes per rank"):
            search(ranks=2, microbatches=2, recompute=True, live_limit=live_limit)


# --- moves -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["1f1b", "zb-h1", "zbv", "dualpipev"])
def test_moves_keep_the_actions_and_the_order_of_every_list(family: str) -> None:
    plain = build(family, ranks=2, microbatches=3)
    rng = random.Random(1)
    moves = PolicyMoves(plain, rng, recompute=True, offload=True)
    compute = sorted(str(part) for row in plain.ranks for step in row for part in step.parts)
    schedule, seen = plain, set()
    for _ in range(300):
        changed = moves.changed(schedule)
        if changed is None or validate(changed):
            codes = set() if changed is None else {violation.code for violation in validate(changed)}
            assert codes <= {"deadlock", "used-before-computed"}
            continue
        schedule = changed
        seen |= set(schedule.table.kinds)
        parts = [part for row in schedule.ranks for step in row for part in step.parts]
        memory = (Kind.RECOMPUTE, Kind.OFFLOAD, Kind.RELOAD)
        assert sorted(str(part) for part in parts if part.kind not in memory) == compute
    assert {Kind.RECOMPUTE, Kind.OFFLOAD, Kind.RELOAD} <= seen
