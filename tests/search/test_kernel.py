"""Promises of the loops: an order takes as long as the simulator says, however much of it was run again."""

from __future__ import annotations

import copy
import random
from itertools import islice

import numpy as np
import pytest

import penstock
from penstock import simulate, validate
from penstock.bounds import OBJECTIVES
from penstock.search import kernel
from penstock.search.annealing import improve
from penstock.search.problem import Problem
from penstock.search.seeds import family_schedules, made, serial
from tests.support.search_instances import random_problem


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_an_order_takes_as_long_as_the_simulator_says(objective: str) -> None:
    rng = random.Random(objective)
    for _ in range(40):
        problem = random_problem(rng, objective)
        for seed in (serial(problem), *islice(made(problem, lambda: False), 8)):
            schedule = problem.written(seed.order, "an order", problem.faster_whole)
            assert not validate(schedule)
            timeline = simulate(schedule, problem.costs)
            assert problem.value(seed.order) == pytest.approx(getattr(timeline, objective), rel=1e-12)


@pytest.mark.parametrize("split", [True, False])
def test_an_order_fits_if_the_simulator_says_so(split: bool) -> None:  # noqa: FBT001
    rng = random.Random(split)
    for _ in range(60):
        given = random_problem(rng, "makespan")
        free = Problem(given.placement, given.microbatches, given.costs, split=split)
        order = next(made(free, lambda: False)).order
        peak = max(simulate(free.schedule_of(order, "an order"), given.costs).peak_memory)
        for limit, fits in ((peak, True), (peak - 0.5, False)):
            problem = Problem(given.placement, given.microbatches, given.costs, limit, split=split)
            assert problem.fits(order) is fits


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_running_again_what_a_move_touches_is_running_all(objective: str) -> None:
    rng = random.Random(objective)
    for _ in range(30):
        problem = random_problem(rng, objective)
        tables, order = problem.tables, serial(problem).order
        state = kernel.blank(tables)
        kernel.measure(tables, order, state, problem.goal)
        for _ in range(40):
            at = rng.randrange(len(order))
            other = min(at + 1, int(tables.bounds[tables.hosts[order[at] // 3] + 1]) - 1)
            moved = order.copy()
            moved[at], moved[other] = order[other], order[at]
            fresh = kernel.blank(tables)
            whole = kernel.measure(tables, moved, fresh, problem.goal)
            kept = copy.deepcopy(state)
            cut = kernel.cut(tables, moved, state, at)
            again = kernel.resume(tables, moved, state, *cut, problem.goal, np.inf)
            assert again == whole
            if whole[0] < np.inf and problem.fits(moved):
                assert all((ours == theirs).all() for ours, theirs in zip(state, fresh))
                order = moved
            else:
                kernel.take_over(tables, kept, state, *cut)
                assert all((ours == theirs).all() for ours, theirs in zip(state, kept))


def test_an_order_that_is_surely_worse_is_given_up() -> None:
    problem = Problem(penstock.Placement.loop(4), 8, penstock.Costs())
    order, tables = serial(problem).order, problem.tables
    value = problem.value(order)
    at, done = tables.bounds[:-1].copy(), np.zeros(len(tables.seconds), dtype=np.int64)
    for worst, found in ((value, value), (value - 1, np.inf)):
        assert kernel.resume(tables, order, kernel.blank(tables), at, done, problem.goal, worst)[0] == found


def test_ranks_that_wait_for_each_other_take_for_ever() -> None:
    problem = Problem(penstock.Placement.loop(2), 1, penstock.Costs())
    assert problem.value(np.array([1, 0, 2, 3, 4, 5])) == np.inf


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_moves_never_make_an_order_worse_and_keep_its_limits(objective: str) -> None:
    rng = random.Random(objective)
    for _ in range(15):
        problem = random_problem(rng, objective)
        start = serial(problem).order
        best, value, tried, runs = improve(
            problem.tables, start, problem.goal, 2000, 3.0, 0.8, 1, np.zeros(1, dtype=np.int64)
        )
        assert value <= problem.value(start)
        assert value == problem.value(best)
        assert problem.fits(best)
        assert sorted(best) == sorted(start)
        assert 0 <= runs <= tried == 2000


def test_a_schedule_is_the_same_after_it_was_tokens() -> None:
    problem = Problem(penstock.Placement.v(4), 8, penstock.Costs())
    for schedule in family_schedules(problem):
        if schedule.name in ("v-half", "v-min", "zbv"):
            again = problem.written(problem.order_of(schedule), "again", frozenset(range(8)))
            assert [list(map(str, row)) for row in again.ranks] == [
                list(map(str, row))
                for row in problem.written(problem.order_of(again), "again", frozenset(range(8))).ranks
            ]


def test_a_backward_is_whole_where_splitting_it_gains_nothing() -> None:
    problem = Problem(penstock.Placement.loop(1), 2, penstock.Costs())
    assert str(problem.schedule_of(serial(problem).order, "whole").ranks[0][1]) == "0B0"
