"""Bounds from a memory limit: they prove known optima, and never exceed one."""

from __future__ import annotations

import random

import pytest

from penstock import Costs, Placement, search
from penstock.bounds import OBJECTIVES, Workload, bounds, rank_bounds
from penstock.search.exact import Effort, solve
from penstock.search.problem import Problem
from penstock.search.seeds import serial
from tests.support.grids import examples

V_OPTIMA = {(4, 16, 4): 107, (4, 16, 6): 101, (4, 8, 4): 59, (3, 5, 4): 35}
"""Ranks, microbatches and live activations per rank of a V: the least makespan with F = I = W = 1."""
SIZES = ((1, 2, 4), (1, 3, 3), (2, 1, 4), (2, 2, 2), (2, 2, 3), (2, 3, 1), (3, 1, 3), (3, 2, 1), (3, 2, 2))
"""Ranks, stages per rank and microbatches of problems that are solved in less than a second."""


@pytest.mark.parametrize(("p", "m", "k"), V_OPTIMA)
def test_a_v_in_little_memory_is_proved_optimal(p: int, m: int, k: int) -> None:
    bound = bounds(Workload(Placement.v(p), m, Costs()), k)[0]
    assert (bound.seconds, bound.name) == (V_OPTIMA[p, m, k], "warm-up and drain")
    found = search(ranks=p, microbatches=m, placement=Placement.v(p), live_limit=k, moves=0)
    assert found.proved
    assert found.found_by in {"family v-min", "family v-half"}


@pytest.mark.parametrize("p", [2, 3, 5, 8])
def test_a_v_has_the_closed_form(p: int) -> None:
    for m, k in ((2 * p, p), (3 * p, p + 1), (5 * p, 2 * p - 2)):
        found = bounds(Workload(Placement.v(p), m, Costs()), k)
        assert {each.name: each.seconds for each in found}["warm-up and drain"] >= 6 * m + 6 * p - 1 - 3 * k


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("split", [True, False])
def test_activations_of_no_bytes_need_no_memory(objective: str, split: bool) -> None:  # noqa: FBT001
    costs = Costs(forward=(5, 2, 1), backward_input=(9, 9, 4), backward_weight=(2, 9, 2), activation=0)
    work = Workload(Placement.loop(3), 3, costs, split=split)
    free = bounds(work, None, objective)[0].seconds
    assert bounds(work, 0, objective)[0].seconds == free
    best = search(ranks=3, microbatches=3, costs=costs, objective=objective, split=split, moves=4000).value
    for limit in (0, 4):
        few = rank_bounds(work, limit, objective, best, lambda states: states / 10_000)
        found = [bound.seconds for bound in few]
        assert 0 < max(found) <= best


def little_memory(rng: random.Random) -> Problem:
    """Unequal stages, often with latency, in memory for one microbatch or little more."""
    ranks, stages_per_rank, m = rng.choice(SIZES)
    placement = rng.choice((Placement.loop, Placement.v))(ranks, stages_per_rank)
    stages = range(placement.num_stages)
    equal, same_size = rng.random() < 0.3, rng.random() < 0.5
    forward, inputs, weights, held = (
        tuple(rng.randint(low, 6) for _ in stages) if not equal else (rng.randint(low, 6),) * len(stages)
        for low in (1, 1, 0, 1)
    )
    held = (2,) * len(stages) if same_size else held
    costs = Costs(
        forward=forward,
        backward_input=inputs,
        backward_weight=weights,
        backward=rng.choice((None, tuple(max(1, i + w - 1) for i, w in zip(inputs, weights)))),
        latency=rng.choice((0, 0, 1, 3)),
        launch_overhead=rng.choice((0, 0, 0, 1)),
        activation=held,
        activation_freed_by_input=rng.choice((0, held, tuple(each // 2 for each in held))),
    )
    least = max(sum(held[s] for s in own) for own in placement.stages_of_rank)
    limit = rng.choice((least, least + 1, least + 2, 3 * least // 2, 2 * least))
    objective = rng.choice(("makespan", "makespan", "span"))
    return Problem(placement, m, costs, limit, objective, rng.random() < 0.8)


def test_no_bound_exceeds_a_proved_optimum() -> None:
    pytest.importorskip("ortools", reason="the exact solver is an extra")
    rng, count = random.Random(6), examples(100)
    effort = Effort(seconds=3, deterministic=True, workers=1, seed=0)
    proved = 0
    for _ in range(count):
        problem = little_memory(rng)
        found = solve(problem, serial(problem), 0.0, effort)
        assert found.order is not None
        value = problem.value(found.order)
        proved += found.bound >= value * (1 - 1e-9)
        for bound in bounds(problem.work, problem.memory_limit, problem.objective):
            assert bound.seconds <= value * (1 + 1e-9), (problem, bound)
    assert proved >= 0.95 * count
