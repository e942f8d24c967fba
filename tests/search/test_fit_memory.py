"""Promises of fit-memory: within the limit, never slower than a policy, and nothing that is not needed."""

from __future__ import annotations

import random
from itertools import combinations, product

import pytest

import penstock
from penstock import Costs, Kind, Schedule, SearchError, build, simulate, validate
from penstock.lowering import Offload, Policy, Recompute
from penstock.search import FitMemory
from tests.support.grids import small
from tests.support.passes import FAMILIES

COSTS = Costs(activation=10, checkpoint=1, host_bandwidth=8, activation_freed_by_input=6)


def test_what_fits_stays_as_it_is() -> None:
    schedule = build("1f1b", ranks=3, microbatches=4)
    assert FitMemory(30, COSTS)(schedule) == schedule


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "po-h"])  # which has OFFLOAD
@small(lambda family: family in {"1f1b", "interleaved-zero-bubble", "zbv", "dualpipev"})
def test_every_family_fits_and_is_no_slower_than_the_best_policy(family: str) -> None:
    schedule = build(family, ranks=3, microbatches=4)
    least = max(simulate(Recompute()(schedule), COSTS).peak_memory)
    limit = (least + max(simulate(schedule, COSTS).peak_memory)) / 2
    fitted = FitMemory(limit, COSTS)(schedule)
    assert validate(fitted) == []
    timeline = simulate(fitted, COSTS)
    assert max(timeline.peak_memory) <= limit
    policies = [Recompute(), Recompute(policy=Policy(every=2)), Offload(), Offload(ahead=0)]
    others = [simulate(each(schedule), COSTS) for each in policies]
    assert timeline.makespan <= min(each.makespan for each in others if max(each.peak_memory) <= limit)


@pytest.mark.parametrize("seed", range(6))
def test_it_fits_wherever_any_choice_of_recomputations_does(seed: int) -> None:
    rng = random.Random(seed)
    schedule = build(rng.choice(("1f1b", "gpipe", "zb-h1")), ranks=2, microbatches=3)
    costs = Costs(activation=4, checkpoint=rng.choice((0, 1)), activation_freed_by_input=rng.choice((0, 4)))
    pairs = list(product(range(2), range(3)))
    peaks, times = [], []
    for count in range(len(pairs) + 1):
        for chosen in combinations(pairs, count):
            found = simulate(recomputed(schedule, chosen), costs)
            peaks.append(max(found.peak_memory))
            times.append(found.makespan)
    for limit in sorted(set(peaks)):
        fitted = simulate(FitMemory(limit, costs, offload=False)(schedule), costs)
        best = min(time for time, peak in zip(times, peaks, strict=True) if peak <= limit)
        assert max(fitted.peak_memory) <= limit
        assert best <= fitted.makespan <= best * 1.1
    with pytest.raises(SearchError, match="no policy of recompute fits"):
        FitMemory(min(peaks) - 1, costs, offload=False)(schedule)


def recomputed(schedule: Schedule, pairs: tuple[tuple[int, int], ...]) -> Schedule:
    whole = Recompute()(schedule)
    rows = [
        [
            step
            for step in row
            if step.kind is not Kind.RECOMPUTE or (step.parts[0].stage, step.parts[0].microbatch) in pairs
        ]
        for row in whole.ranks
    ]
    return Schedule(rows, schedule.placement, schedule.microbatches)


def test_only_what_is_allowed_is_added() -> None:
    schedule = build("gpipe", ranks=2, microbatches=6)
    assert not FitMemory(40, COSTS, recompute=False)(schedule).table.has(Kind.RECOMPUTE)
    assert not FitMemory(40, COSTS, offload=False)(schedule).table.has(Kind.OFFLOAD)
    with pytest.raises(SearchError, match="needs recompute=True or offload=True"):
        FitMemory(40, COSTS, recompute=False, offload=False)


def test_the_error_names_the_least_memory_that_was_found() -> None:
    with pytest.raises(SearchError, match=r"memory limit of 5 B per rank; the least that was found is 1\d B"):
        FitMemory(5, COSTS)(build("1f1b", ranks=2, microbatches=2))
    with pytest.raises(penstock.ScheduleError, match="already has RECOMPUTE actions"):
        FitMemory(5, COSTS)(Recompute()(build("1f1b", ranks=2, microbatches=2)))
    with pytest.raises(SearchError, match="memory_limit must be a number of bytes"):
        FitMemory(-1)
