"""No bound of a search exceeds the best of all valid orders, also of those with microbatches out of order."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import permutations, product
from typing import TypeVar

import pytest

from penstock import Costs, Placement, Schedule, search, simulate, validate
from penstock.search.exact import Effort, solve
from penstock.search.problem import Problem
from penstock.search.seeds import serial
from tests.support.grids import examples

Value = TypeVar("Value")

# --- all orders ------------------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class Microbatch:
    """Steps of F and I that are done, when the next one can start, and stages whose W is not done."""

    done: int = 0
    ready: float = 0.0
    weights: tuple[int, ...] = ()


@dataclass(frozen=True)
class State:
    """Per rank: when it is free, its first start and its bytes; microbatches are alike, so they are sorted."""

    clock: tuple[float, ...]
    first: tuple[float | None, ...]
    live: tuple[float, ...]
    microbatches: tuple[Microbatch, ...]
    last: float = 0.0


@dataclass
class EveryOrder:
    """Tries every order of a chain of stages: at each time any step of any microbatch whose inputs are there.

    It shares nothing with the search. Steps are dispatched by their start, each as early as possible.
    """

    hosts: tuple[int, ...]
    microbatches: int
    seconds: dict[str, tuple[float, ...]]
    latency: float
    held: tuple[float, ...]
    freed: tuple[float, ...]
    limit: float
    split: bool
    objective: str
    best: float = float("inf")
    seen: set[State] = field(default_factory=set)

    def least(self) -> float:
        """The best value of all orders."""
        ranks = max(self.hosts) + 1
        self.extend(State((0.0,) * ranks, (None,) * ranks, (0.0,) * ranks, (Microbatch(),) * self.microbatches))
        return self.best

    def extend(self, state: State) -> None:
        """Every order that begins so; not those that cannot be better than the best."""
        value = self.least_after(state)
        if value >= self.best - 1e-9 or state in self.seen:
            return
        self.seen.add(state)
        followers = sorted(self.followers(state), key=lambda each: each.last)
        if not followers and all(each.done == 2 * len(self.hosts) for each in state.microbatches):
            self.best = value
        for each in followers:
            self.extend(each)

    def least_after(self, state: State) -> float:
        """The objective if no rank waited any more."""
        seconds, n = self.seconds, len(self.hosts)
        left = [0.0] * len(state.clock)
        for each in state.microbatches:
            for step in range(each.done, 2 * n):
                stage = min(step, 2 * n - 1 - step)
                whole = seconds["B"][stage]
                if self.split:
                    whole = min(whole, seconds["I"][stage] + seconds["W"][stage])
                left[self.hosts[stage]] += seconds["F"][stage] if step < n else whole
            for stage in each.weights:
                left[self.hosts[stage]] += seconds["W"][stage]
        ends = [max(now, state.last) + more if more else now for now, more in zip(state.clock, left)]
        if self.objective == "makespan":
            return max(ends)
        return max(more if first is None else end - first for end, first, more in zip(ends, state.first, left))

    def followers(self, state: State) -> Iterator[State]:
        """The states one step later."""
        n = len(self.hosts)
        for place, each in enumerate(state.microbatches):
            if place and each == state.microbatches[place - 1]:
                continue
            if each.done < 2 * n:
                stage = min(each.done, 2 * n - 1 - each.done)
                for kind in "F" if each.done < n else "BI" if self.split else "B":
                    yield from self.taken(state, place, kind, stage)
            for stage in each.weights:
                yield from self.taken(state, place, "W", stage)

    def taken(self, state: State, place: int, kind: str, stage: int) -> Iterator[State]:
        """After one step, if it fits and does not start before the last one."""
        rank, old = self.hosts[stage], state.microbatches[place]
        held, freed = self.held[stage], self.freed[stage]
        live = state.live[rank] + {"F": held, "I": -freed, "W": freed - held, "B": -held}[kind]
        start = max(state.clock[rank], 0.0 if kind == "W" else old.ready)
        if start < state.last or (kind == "F" and live > self.limit):
            return
        end, done, weights = start + self.seconds[kind][stage], old.done, set(old.weights)
        if kind == "W":
            new = replace(old, weights=tuple(sorted(weights - {stage})))
        else:
            following = min(done + 1, max(2 * len(self.hosts) - 2 - done, 0))
            hop = self.latency if self.hosts[following] != rank else 0.0
            weights |= {stage} if kind == "I" else set()
            new = Microbatch(done + 1, end + hop, tuple(sorted(weights)))
        microbatches = [*state.microbatches[:place], new, *state.microbatches[place + 1 :]]
        yield State(
            changed(state.clock, rank, end),
            changed(state.first, rank, start) if state.first[rank] is None else state.first,
            changed(state.live, rank, live),
            tuple(sorted(microbatches)),
            start,
        )


def changed(values: tuple[Value, ...], at: int, value: Value) -> tuple[Value, ...]:
    """The values with another one at a place."""
    return (*values[:at], value, *values[at + 1 :])


# --- problems --------------------------------------------------------------------------------------

SIZES = (((0, 1), 2), ((0, 1), 3), ((0, 1, 2), 2), ((0, 1, 1, 0), 1), ((0, 1, 0), 2), ((0, 0, 1), 2))
"""The rank of each stage, and the number of microbatches."""
OUT_OF_ORDER = (
    ((6, 4, 1), (1, 8, 1), (3, 5, 9), 52),
    ((6, 4, 1), (1, 7, 1), (3, 5, 9), 49),
    ((7, 2, 1), (1, 7, 1), (4, 6, 9), 46),
)
"""F, I and W of three ranks whose best span with three microbatches needs these out of order."""


def small_costs(rng: random.Random, stages: int) -> Costs:
    """Unequal stages; B is as long as I and W."""
    forward, inputs, weights = (tuple(rng.randint(low, 9) for _ in range(stages)) for low in (1, 1, 0))
    held = tuple(rng.randint(1, 4) for _ in range(stages))
    return Costs(
        forward=forward,
        backward_input=inputs,
        backward_weight=weights,
        latency=rng.choice((0, 0, 1, 3)),
        activation=held,
        activation_freed_by_input=tuple(rng.randint(0, each) for each in held),
    )


def small_problem(rng: random.Random) -> Problem:
    """With and without a memory limit; B is as long as I and W, or shorter."""
    hosts, m = rng.choice(SIZES)
    placement, costs = Placement(hosts), small_costs(rng, len(hosts))
    parts = (costs.per_stage(f"backward_{each}", len(hosts)) for each in ("input", "weight"))
    whole = tuple(max(1, i + w - rng.choice((0, 1, 3))) for i, w in zip(*parts))
    costs, held = (
        replace(costs, backward=rng.choice((None, None, whole))),
        costs.per_stage("activation", len(hosts)),
    )
    least = max(sum(held[s] for s in own) for own in placement.stages_of_rank)
    limit, objective = rng.choice((None, None, least, 2 * least)), rng.choice(("makespan", "span", "span"))
    return Problem(placement, m, costs, limit, objective, rng.random() < 0.8)


def least_of(problem: Problem, known: float) -> float:
    """The best value of all orders; that of an order that is known makes it faster."""
    n, costs = problem.placement.num_stages, problem.costs
    names = {"F": "forward", "I": "backward_input", "W": "backward_weight"}
    seconds = {kind: tuple(costs.per_stage(name, n)) for kind, name in names.items()}
    seconds["B"] = tuple(costs.full_backward(n))
    held, freed = (tuple(costs.per_stage(f"activation{each}", n)) for each in ("", "_freed_by_input"))
    limit = float("inf") if problem.memory_limit is None else problem.memory_limit
    hosts, latency = tuple(problem.placement.stage_to_rank), costs.per_edge("latency", n - 1)[0]
    every = EveryOrder(
        *(hosts, problem.microbatches, seconds, latency, held, freed, limit, problem.split, problem.objective)
    )
    every.best = known + 1e-6
    return every.least()


# --- promises --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("forward", "inputs", "weights", "least"), OUT_OF_ORDER)
def test_a_span_is_not_proved_where_microbatches_out_of_order_have_a_shorter_one(
    forward: tuple[int, ...], inputs: tuple[int, ...], weights: tuple[int, ...], least: float
) -> None:
    costs = Costs(forward=forward, backward_input=inputs, backward_weight=weights)
    found = search(ranks=3, microbatches=3, costs=costs, objective="span", moves=250_000)
    assert found.bound.seconds <= least <= found.value
    assert found.proved == (found.value == least)


def test_such_an_order_is_valid_and_has_that_span() -> None:
    schedule = Schedule.parse(
        "0F0 0F1 0F2 0I1 0W1 0I0 0W0 0I2 0W2\n"
        "1F1 1F0 1I1 1F2 1I0 1I2 1W0 1W2 1W1\n"
        "2F1 2I1 2F0 2I0 2W0 2F2 2I2 2W2 2W1"
    )
    forward, inputs, weights, least = OUT_OF_ORDER[0]
    costs = Costs(forward=forward, backward_input=inputs, backward_weight=weights)
    assert validate(schedule) == []
    assert simulate(schedule, costs).span == least


@pytest.mark.parametrize("scale", [1.0, 2**0.5 / 7])
def test_no_bound_of_the_solver_or_the_search_exceeds_the_best_of_all_orders(scale: float) -> None:
    pytest.importorskip("ortools", reason="the exact solver is an extra")
    rng = random.Random(scale)
    effort = Effort(seconds=2 if scale == 1 else 0.05, deterministic=True, workers=1, seed=0)
    for _ in range(examples(150 if scale == 1 else 40)):
        problem = small_problem(rng)
        scaled = replace(problem, costs=problem.costs.scaled(scale))
        solved = solve(scaled, serial(scaled), 0.0, effort)
        assert solved.order is not None
        least = least_of(problem, problem.value(solved.order)) * scale
        assert solved.bound <= least * (1 + 1e-9), problem
        if scale == 1 and problem.objective == "makespan":
            assert solved.bound == problem.value(solved.order) == least, problem
        found = search(
            ranks=problem.placement.num_ranks,
            placement=problem.placement,
            microbatches=problem.microbatches,
            costs=scaled.costs,
            memory_limit=problem.memory_limit,
            objective=problem.objective,
            split=problem.split,
            moves=10_000,
        )
        assert found.bound.seconds <= least * (1 + 1e-9), problem
        assert found.value >= least * (1 - 1e-9), problem


def lists(stage: int, m: int) -> Iterator[tuple[str, ...]]:
    """Every list of F, I and W of a rank with one stage, microbatches in any order."""
    steps = [f"{stage}{kind}{i}" for i in range(m) for kind in "FIW"]
    for row in permutations(steps):
        place = {step: at for at, step in enumerate(row)}
        if all(place[steps[3 * i]] < place[steps[3 * i + 1]] < place[steps[3 * i + 2]] for i in range(m)):
            yield row


def test_no_period_is_proved_that_an_order_beats() -> None:
    rng, placement = random.Random(0), Placement.loop(2)
    every = [Schedule(list(rows), placement, 2) for rows in product(lists(0, 2), lists(1, 2))]
    valid = [schedule for schedule in every if not validate(schedule)]
    for _ in range(examples(40)):
        costs = replace(small_costs(rng, 2), optimizer_step=rng.choice((0, 2)))
        periods = (simulate(schedule, costs, with_period=True).period or 0.0 for schedule in valid)
        least = min(periods)
        found = search(ranks=2, microbatches=2, costs=costs, objective="period", moves=250_000)
        assert found.bound.seconds <= least * (1 + 1e-9), costs
        assert not found.proved or found.value <= least * (1 + 1e-9), costs
