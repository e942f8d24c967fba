"""The kernel agrees with the simulator, in full runs and in reruns from a change."""

from __future__ import annotations

import copy
import random
from itertools import islice

import numpy as np
import pytest

import penstock
from penstock import simulate, validate
from penstock.bounds import OBJECTIVES
from penstock.ir.encoding import Ints
from penstock.search import kernel
from penstock.search.kernel import INPUT_GRAD, PAIRED, SEPARATE, TOKEN, WEIGHT_GRAD, empty_state
from penstock.search.problem import Problem
from penstock.search.seeds import list_scheduled, serial
from tests.support.grids import examples
from tests.support.search_instances import random_problem


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_objectives_equal_those_of_the_simulator(objective: str, pairs: bool) -> None:  # noqa: FBT001
    rng = random.Random(objective)
    paired, count = 0, examples(60)
    for _ in range(count):
        problem = random_problem(rng, objective, pairs=pairs)
        for seed in (serial(problem), *islice(list_scheduled(problem, lambda: False), 8)):
            order = randomly_joined(problem, seed, rng)
            if (value := problem.value(order)) < np.inf:
                schedule = problem.fused_schedule(order, "an order")
                assert not validate(schedule)
                timeline = simulate(schedule, problem.costs, with_period=True)
                assert value == pytest.approx(getattr(timeline, objective), rel=1e-12)
                paired += schedule.num_steps < len(schedule.table.slot)
            else:
                assert pairs
                assert validate(problem.fused_schedule(order, "an order"))
    assert (paired > count) is pairs


def randomly_joined(problem: Problem, order: Ints, rng: random.Random) -> Ints:
    """The order with some of its adjacent I and W joined, where B is shorter, some F and I paired, some not."""
    variants = problem.variants(order)
    base = rng.choice(variants[-2:]) if problem.can_pair else variants[0]
    chosen = np.array([rng.random() < 0.7 for _ in order])
    is_weight = (base & TOKEN) % 3 == WEIGHT_GRAD
    can_join = is_weight & (problem.can_pair | (problem.fused_seconds[(base & TOKEN) // 3] >= 0))
    return np.where(chosen, base, np.where(can_join, base | SEPARATE, base & ~PAIRED))


@pytest.mark.parametrize("split", [True, False])
def test_an_order_fits_exactly_if_its_simulated_peak_does(split: bool) -> None:  # noqa: FBT001
    rng = random.Random(split)
    for _ in range(examples(100)):
        given = random_problem(rng, "makespan")
        free = Problem(given.placement, given.microbatches, given.costs, split=split)
        order = next(list_scheduled(free, lambda: False))
        peak = max(simulate(free.schedule_of(order, "an order")[0], given.costs).peak_memory)
        for limit, fits in ((peak, True), (peak - 0.5, False)):
            problem = Problem(given.placement, given.microbatches, given.costs, limit, split=split)
            assert problem.fits(order) is fits


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_rerun_from_a_change_equals_a_full_run(objective: str, pairs: bool) -> None:  # noqa: FBT001
    rng = random.Random(objective)
    for _ in range(30):
        problem = random_problem(rng, objective, pairs=pairs)
        arrays, order = problem.arrays, randomly_joined(problem, serial(problem), rng)
        state = empty_state(arrays)
        if kernel.evaluate(arrays, order, state, problem.objective_index)[0] == np.inf:
            continue  # joined at random, it deadlocks: there is no run to start from
        for _ in range(40):
            at = rng.randrange(len(order))
            other = min(at + 1, int(arrays.rank_bounds[arrays.rank_of_stage[(order[at] & TOKEN) // 3] + 1]) - 1)
            moved = order.copy()
            moved[at], moved[other] = order[other], order[at]
            token = moved[at] & TOKEN
            if token % 3 == WEIGHT_GRAD and (problem.can_pair or problem.fused_seconds[token // 3] >= 0):
                moved[at] |= rng.choice((0, SEPARATE))
            elif token % 3 == INPUT_GRAD and problem.can_pair:
                moved[at] ^= rng.choice((0, PAIRED))
            fresh = empty_state(arrays)
            whole = kernel.evaluate(arrays, moved, fresh, problem.objective_index)
            kept = copy.deepcopy(state)
            point = kernel.resume_point(arrays, moved, state, at)
            again = kernel.resume(arrays, moved, state, *point, problem.objective_index, np.inf)
            assert again == whole
            if whole[0] < np.inf and problem.fits(moved):
                assert all((ours == theirs).all() for ours, theirs in zip(state, fresh))
                order = moved
            else:
                kernel.copy_suffix(arrays, kept, state, *point)
                assert all((ours == theirs).all() for ours, theirs in zip(state, kept))


def test_a_run_that_surely_exceeds_the_limit_is_aborted() -> None:
    problem = Problem(penstock.Placement.loop(4), 8, penstock.Costs())
    order, arrays = serial(problem), problem.arrays
    value = problem.value(order)
    at, done = arrays.rank_bounds[:-1].copy(), np.zeros(len(arrays.seconds), dtype=np.int64)
    for worst, found in ((value, value), (value - 1, np.inf)):
        assert (
            kernel.resume(arrays, order, empty_state(arrays), at, done, problem.objective_index, worst)[0]
            == found
        )


def test_a_deadlock_has_an_infinite_objective() -> None:
    problem = Problem(penstock.Placement.loop(2), 1, penstock.Costs())
    assert problem.value(np.array([1, 0, 2, 3, 4, 5])) == np.inf
