"""Promise: with every family of schedules, losses, gradients and weights are those of one process."""

from __future__ import annotations

import pytest
import torch

from penstock import Schedule, build
from penstock.lowering import MergeBackward, SplitBackward
from tests.support.families import FAMILIES
from tests.support.grids import small, thinned
from tests.support.models import MODELS
from tests.support.pool import Pools
from tests.support.reference import Case, backwards_in_order, problems_of, run_cases

OPEN = ("interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble")
TASKS_IN_TURN = ("dropout", "batch-norm", "tied", "repeated", "nested", "uneven", "padded")
MICROBATCHES = {2: (1, 4, 5), 4: (2, 4, 6)}
"""Fewer than ranks, as many or twice as many, and no multiple of them."""


def forms(schedule: Schedule) -> list[Schedule]:
    """As it is, with every backward split, and with those merged that can be."""
    found = [schedule]
    for step in (SplitBackward(), MergeBackward()):
        changed = step(schedule)
        if changed not in found:
            found.append(changed.renamed(f"{schedule.name} {step.name}"))
    return found


def schedules(family: str, p: int) -> list[Schedule]:
    few, many, odd = MICROBATCHES[p]
    legs = (1, 3) if family in OPEN else ()
    built = [build(family, ranks=p, microbatches=m) for m in (few, many)]
    built += [build(family, ranks=p, microbatches=odd, stages_per_rank=v) for v in legs]
    return built + forms(build(family, ranks=p, microbatches=odd))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("p", [2, 4])
@small(lambda p: p == 2)
def test_every_family_trains_as_one_process(pools: Pools, family: str, p: int) -> None:
    cases = []
    for place, schedule in enumerate(schedules(family, p)):
        turn = (place // 2 + FAMILIES.index(family)) % len(TASKS_IN_TURN)
        task = "transformer" if place % 2 == 0 else TASKS_IN_TURN[turn]
        in_order = backwards_in_order(schedule)
        cases.append(Case(schedule, task, "adamw" if in_order and place % 3 else "sgd"))
    cases.append(Case(cases[-1].schedule, "transformer", "adamw", torch.float64))
    cases = thinned(cases, 2, FAMILIES.index(family) % 2)  # even or odd places in turn
    assert not problems_of(cases, pools(p).run(run_cases, cases))


@pytest.mark.full
def test_groups_and_unequal_stages_train_as_one_process(pools: Pools) -> None:
    grouped = [
        build(name, ranks=4, microbatches=8, stages_per_rank=2, group=group)
        for name, group in (("interleaved-1f1b", 6), ("interleaved-1f1b", 8), ("interleaved-zero-bubble", 2))
    ]
    unequal = [
        build(name, ranks=4, microbatches=6, stages_per_rank=[1, 2, 2, 1])
        for name in ("interleaved-1f1b", "interleaved-zero-bubble", "zbv", "dualpipev")
    ]
    cases = [Case(schedule, "transformer", steps=1) for schedule in (*grouped, *unequal)]
    assert not problems_of(cases, pools(4).run(run_cases, cases))


@pytest.mark.full
def test_interleaved_pairs_train_as_one_process(pools: Pools) -> None:
    def overlap(microbatches: int, stages_per_rank: int | list[int] = 2, group: int | None = None) -> Schedule:
        name = "interleaved-overlap"
        return build(name, ranks=4, microbatches=microbatches, stages_per_rank=stages_per_rank, group=group)

    built = [*forms(overlap(7)), overlap(8, 3), overlap(8, group=6), overlap(6, [1, 2, 2, 1])]
    cases = [Case(schedule, "transformer", "adamw", torch.float64, steps=1) for schedule in built]
    assert not problems_of(cases, pools(4).run(run_cases, cases))


@pytest.mark.full
def test_eight_ranks_train_as_one_process(pools: Pools) -> None:
    cases = [
        Case(build("interleaved-1f1b", ranks=8, microbatches=8), steps=1),
        Case(build("zbv", ranks=8, microbatches=3), "transformer", steps=1),
    ]
    assert not problems_of(cases, pools(8).run(run_cases, cases))


@pytest.mark.parametrize("family", ["gpipe", "1f1b", "zb-h1", "zbv", "interleaved-zero-bubble"])
@small(lambda family: family == "zb-h1")
def test_every_model_trains_as_in_one_process(pools: Pools, family: str) -> None:
    schedule = build(family, ranks=2, microbatches=4)
    cases = [Case(schedule, task, steps=2) for task in MODELS]
    assert not problems_of(cases, pools(2).run(run_cases, cases))
