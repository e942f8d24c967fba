"""The search driver: runs the layers of a search on every placement until the budget is used.

    families and list scheduling     ->  starting orders
    simulated annealing, all cores   ->  better orders
    all orders of a few ranks        ->  better bounds
    CP-SAT, where the size allows    ->  better orders, better bounds

The result is never worse than a family that fits and that there was time to evaluate.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cache, partial
from math import inf
from threading import Event
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from penstock.arguments import plural
from penstock.bounds import Bound, Workload, bounds, rank_bounds
from penstock.compilation import COMPILED
from penstock.cost.costs import Costs
from penstock.ir.encoding import Ints
from penstock.ir.kinds import Kind
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.processes import usable_cores
from penstock.search import exact
from penstock.search.kernel import PAIRED, anneal
from penstock.search.problem import Problem
from penstock.search.request import Budget, Jitter, OnProgress, Progress, SearchResult, gap_of
from penstock.search.seeds import (
    family_builders,
    grouped_schedules,
    list_scheduled,
    repeat_steady_state,
    serial,
)
from penstock.simulation.simulator import simulate
from penstock.simulation.timeline import Timeline

# The search of one placement: its problem, its bound, its best orders, and how they are improved.


_KEPT = 12
_TASKS = 4
"""Concurrent annealing runs; the same number on every machine, so that a seed fixes the result."""
_TEMPERATURES = (0.03, 0.1, 0.3, 1.0)
"""Initial temperatures, in mean step durations."""
_FOCUS = (0.5, 0.8)
"""Shares of moves on the critical path."""
_SLOWDOWN = 1 if COMPILED else 200
"""How much longer a move takes without compilation."""
_MAX_SOLVED_STEPS = 400
"""Steps of the largest problem that is given to the exact solver."""
_MAX_SOLVED_PAIRS = 1000
"""Possible pairs of an F and an I in the largest problem with pairs that is given to the exact solver."""


@dataclass(frozen=True, eq=False)
class FoundOrder:
    """An order, its objective, and how it was found."""

    value: float
    order: Ints
    name: str
    moves: int = 0

    @property
    def found_by(self) -> str:
        """How it was found, in words."""
        return f"{self.name}, then {plural(f'{self.moves:,}', 'move')}" if self.moves else self.name


@dataclass(eq=False)
class PlacementSearch:
    """The best orders of one problem so far."""

    problem: Problem
    bound: Bound = field(init=False)
    kept: list[FoundOrder] = field(default_factory=list)
    """The best orders, each with another value, best first."""
    starts: list[FoundOrder] = field(default_factory=list)
    """Starting orders of annealing runs."""
    families: dict[str, tuple[Schedule, float]] = field(default_factory=dict)
    """Families that fit, unchanged, with their objective."""
    too_large: dict[str, float] = field(default_factory=dict)
    """Peak memory of the other families."""
    skipped: list[str] = field(default_factory=list)
    """Families for which there was no time."""
    family_seconds: float = 0.0
    """The longest time in which a family was built and evaluated."""
    runs: int = 0
    rounds: int = 0

    def __post_init__(self) -> None:
        self.bound = bounds(self.work, self.problem.memory_limit, self.problem.objective)[0]

    @property
    def work(self) -> Workload:
        """The workload that bounds are computed for."""
        return self.problem.work

    @property
    def best(self) -> float:
        """The lowest objective of any order or family."""
        family = min((value for _, value in self.families.values()), default=float("inf"))
        return min(family, self.kept[0].value if self.kept else float("inf"))

    def value_of(self, timeline: Timeline) -> float:
        """The objective of a timeline."""
        return timeline.length(self.problem.objective)

    # --- starting orders ---------------------------------------------------------------------------

    def add_seeds(self, is_late: Callable[[], bool], is_over: Callable[[], bool]) -> None:
        """Add the serial order and families; unless one is optimal, groups and list scheduling too.

        When it is over, no family is added except for the first that fits, and when it is late, nothing else.
        """
        self.add_start(*serial(self.problem))
        for name, builder in family_builders(self.problem).items():
            if self.families and is_over():
                self.skipped.append(name)
                continue
            started = perf_counter()
            if (schedule := builder()) is not None:
                self.add_start(schedule.name, self.problem.order_of(schedule))
                if self._is_comparable(schedule):
                    self.add_family(schedule)
            self.family_seconds = max(self.family_seconds, perf_counter() - started)
        if gap_of(self.best, self.bound.seconds):
            for schedule in grouped_schedules(self.problem):
                if not is_late():
                    self.add_start(schedule.name, self.problem.order_of(schedule))
            for seed in list_scheduled(self.problem, is_late):
                self.add_start(*seed)

    def add_family(self, schedule: Schedule) -> None:
        """Evaluate a family as it is; it is kept if it fits."""
        timeline = simulate(schedule, self.problem.costs, with_period=self.problem.objective == "period")
        peaks = np.array(timeline.peak_memory)
        if (peaks - self.problem.fixed <= self.problem.arrays.memory_limits).all():
            self.families[schedule.name] = (schedule, self.value_of(timeline))
        else:
            self.too_large[schedule.name] = float(peaks.max())

    def _is_comparable(self, schedule: Schedule) -> bool:
        """Whether all steps of a family can be in an order: W, and pairs that save more than a launch."""
        table, problem = schedule.table, self.problem
        can_have_pairs = problem.can_pair or not problem.costs.launch_overhead
        return (problem.split or not table.has(Kind.I, Kind.W)) and (can_have_pairs or not table.has_pairs)

    def add_start(self, name: str, order: Ints) -> None:
        """Add an order and its variants, those that fit and do not deadlock."""
        for variant in self.problem.variants(order):
            if self.problem.fits(variant) and (value := self.problem.value(variant)) < float("inf"):
                is_paired = bool((variant & PAIRED & ~order).any())
                candidate = FoundOrder(value, variant, f"{name} in pairs" if is_paired else name)
                self.starts.append(candidate)
                self.keep(candidate)

    def keep(self, candidate: FoundOrder) -> None:
        """Keep an order among the best, unless one with the same value is kept already."""
        tolerance = 1e-9 * abs(candidate.value)
        if any(abs(other.value - candidate.value) <= tolerance for other in self.kept):
            return
        self.kept = sorted([*self.kept, candidate], key=lambda each: each.value)[:_KEPT]

    # --- annealing ---------------------------------------------------------------------------------

    @property
    def moves_per_run(self) -> int:
        """Moves of an annealing run in the next round; it grows with the rounds."""
        first = min(max(15_000_000 // self.problem.arrays.rank_bounds[-1], 1000), 50_000)
        return int(first * min(1 << (self.rounds // 2), 32)) // _SLOWDOWN or 1

    def anneal(
        self,
        rng: random.Random,
        pool: ThreadPoolExecutor,
        stop: Ints,
        wait: Callable[..., None],
        most: int | None,
    ) -> int:
        """One round of concurrent annealing runs, of at most `most` moves in total; returns the moves made."""
        moves = self.moves_per_run if most is None else min(self.moves_per_run, -(-most // _TASKS))
        self.starts = sorted(self.starts, key=lambda each: each.value)[: 2 * _KEPT]
        tasks = [self._submit(rng, pool, moves, stop) for _ in range(_TASKS)]
        wait([task for _, task in tasks])
        total = 0
        for start, task in tasks:
            order, value, made, runs = task.result()
            self.runs += runs
            total += made
            self.keep(FoundOrder(float(value), order, start.name, start.moves + made))
        self.rounds += 1
        return total

    def _submit(
        self, rng: random.Random, pool: ThreadPoolExecutor, moves: int, stop: Ints
    ) -> tuple[FoundOrder, Future[tuple[Ints, float, int, int]]]:
        """Start an annealing run with random parameters."""
        arrays, start = self.problem.arrays, self._choose_start(rng)
        temperature = rng.choice(_TEMPERATURES) * float(arrays.seconds.mean())
        focus, seed = rng.choice(_FOCUS), rng.randrange(1 << 30)
        objective = self.problem.objective_index
        return start, pool.submit(anneal, arrays, start.order, objective, moves, temperature, focus, seed, stop)

    def _choose_start(self, rng: random.Random) -> FoundOrder:
        """The best order, or with equal probability another of the best or a starting order."""
        chance = rng.random()
        return self.kept[0] if chance < 0.5 else rng.choice(self.kept if chance < 0.75 else self.starts)

    # --- proofs ------------------------------------------------------------------------------------

    def raise_bound(self, best: float, used: Callable[[int], float]) -> None:
        """Raise the bound, up to `best`, by all orders of a few ranks.

        `used` tells the share of the effort that is used, for a number of states.
        """
        problem = self.problem
        for bound in rank_bounds(self.work, problem.memory_limit, problem.objective, best, used):
            if gap_of(bound.seconds, self.bound.seconds):
                self.bound = bound

    @property
    def is_solvable(self) -> bool:
        """Whether the problem is small enough for the exact solver."""
        steps, m = self.problem.arrays.rank_bounds[-1], self.problem.microbatches
        pairs = sum((len(own) * m) ** 2 for own in self.problem.placement.stages_of_rank)
        return bool(steps <= _MAX_SOLVED_STEPS) and (pairs <= _MAX_SOLVED_PAIRS or not self.problem.can_pair)

    def solve(self, effort: exact.Effort, stop: Event) -> None:
        """Run the exact solver for a better order and a better bound."""
        found = exact.solve(self.problem, self.kept[0].order, self.bound.seconds, effort, stop)
        if gap_of(found.bound, self.bound.seconds):
            self.bound = Bound(
                found.bound, "exact", "proved by the exact solver for all orders, microbatches in any order"
            )
        if found.order is not None and self.problem.fits(found.order):
            value = self.problem.value(found.order)
            if value < self.kept[0].value:
                self.keep(FoundOrder(value, found.order, "exact solver"))


_FEW_MICROBATCHES_SECONDS = 10.0
"""Limit of the search with few microbatches whose steady state is repeated."""
_FEW_RANKS_PART = 0.25
"""Of the time that is left after a first annealing, for bounds from a few ranks; states per move otherwise."""
_RANKED_UNDER_JITTER = 6
"""Orders per placement that are simulated with jitter."""
_JITTER_PART = 0.3
"""Of the time limit, for the simulation of these."""
_RESULT_FAMILIES = 3.0
"""Time that is left at the end, in times to evaluate a family: one is evaluated, and the result takes two."""


def run(
    problems: Sequence[Problem], costs: Costs, budget: Budget, jitter: Jitter | None, on_progress: OnProgress
) -> SearchResult:
    """Search all problems and return the best schedule; its timeline is simulated with `costs`."""
    compile_kernels()
    driver = _Driver(problems, costs, budget, jitter, on_progress, random.Random(budget.seed))  # noqa: S311 -- no secret
    return driver.run()


@cache
def compile_kernels() -> None:
    """Compile everything that searches run, or load it from the cache on disk.

    The smallest problem is run once, so that the time limit of a search does not include compilation.
    """
    problem = Problem(Placement((0,)), 1, Costs())
    order = next(list_scheduled(problem, lambda: False)).order
    if problem.fits(order):
        anneal(problem.arrays, order, 0, 1, 1.0, 1.0, 0, np.zeros(1, np.int64))


class _FoundSchedule(NamedTuple):
    """A schedule to choose from."""

    value: float
    found_by: str
    schedule: Schedule
    search: PlacementSearch


@dataclass(eq=False)
class _Driver:
    problems: Sequence[Problem]
    costs: Costs
    budget: Budget
    jitter: Jitter | None
    on_progress: OnProgress
    rng: random.Random
    searches: list[PlacementSearch] = field(init=False)
    started: float = field(default_factory=perf_counter)
    moves_made: int = 0
    interrupted: bool = False
    stop: Event = field(default_factory=Event)
    stop_moves: Any = field(default_factory=lambda: np.zeros(1, dtype=np.int64))

    def __post_init__(self) -> None:
        self.searches = [PlacementSearch(problem) for problem in self.problems]

    def run(self) -> SearchResult:
        try:
            self.search()
        except KeyboardInterrupt:
            if not any(search.kept for search in self.searches):
                raise
            self.interrupted = True
        return self._result()

    # --- budget ------------------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        return perf_counter() - self.started

    @property
    def fraction(self) -> float:
        """Of the budget that is used, or needed to make the result."""
        return self.budget.fraction(self.seconds + self._reserved, self.moves_made)

    @property
    def _reserved(self) -> float:
        """Seconds to make the result: much of the limit where an order has millions of steps."""
        ranking = 0.0 if self.jitter is None else _JITTER_PART * self.budget.seconds
        return ranking + _RESULT_FAMILIES * max(search.family_seconds for search in self.searches)

    @property
    def is_optimal(self) -> bool:
        """Whether no placement can have a better schedule than the best so far."""
        best = min(search.best for search in self.searches)
        return all(search.bound.seconds >= best * (1 - 1e-9) for search in self.searches)

    def _is_late(self, until: float) -> bool:
        """Whether this fraction of the time is used; never with a budget of moves."""
        return self.budget.moves is None and self.fraction >= until

    @property
    def _is_finished(self) -> bool:
        """Whether the result is optimal or the time is used."""
        return self._is_late(1.0) or self.is_optimal

    def _report(self, phase: str) -> None:
        best = min(search.best for search in self.searches)
        bound = min(search.bound.seconds for search in self.searches)
        self.on_progress(Progress(phase, best, bound, self.seconds, self.fraction))

    # --- layers ------------------------------------------------------------------------------------

    def search(self) -> None:
        """Run all layers."""
        for number, search in enumerate(self.searches):
            part = (number + 1) / len(self.searches)
            search.add_seeds(partial(self._is_late, 0.5 * part), partial(self._is_late, part))
            self._report("families and list scheduling")
        with ThreadPoolExecutor(usable_cores() if COMPILED else 1) as pool:
            try:
                self._optimize(pool)
            finally:
                self.stop.set()
                self.stop_moves[0] = 1

    def _optimize(self, pool: ThreadPoolExecutor) -> None:
        for search in self.searches:
            if not self._is_finished:
                self._repeat_steady_state(search)
        self._anneal(pool, until=0.15)
        for number, search in enumerate(self.searches):
            if not self._is_finished:
                self._raise_bound(search, _FEW_RANKS_PART / (len(self.searches) - number))
        solvable = [search for search in self.searches if search.is_solvable and exact.available()]
        for number, search in enumerate(solvable):
            if not self.is_optimal:
                self._solve(search, max(0.85 - self.fraction, 0.0) / (len(solvable) - number))
        self._anneal(pool, until=1.0)

    def _repeat_steady_state(self, search: PlacementSearch) -> None:
        """For many microbatches: search with few, and repeat the steady state of the best orders."""
        few = search.problem.with_few_microbatches()
        if few is None:
            return
        budget = self.budget.part(0.4 / len(self.searches), _FEW_MICROBATCHES_SECONDS)
        small = _Driver(
            [few], self.costs, budget, None, lambda _: self._report("search with few microbatches"), self.rng
        )
        small.search()
        self.moves_made += small.moves_made
        for candidate in small.searches[0].kept[:4]:
            for order in repeat_steady_state(few, candidate.order, search.problem):
                search.add_start(f"{candidate.found_by}, steady state repeated", order)
                if self._is_finished:  # an order of millions of steps takes seconds
                    return
        self._report("repeating the steady state")

    def _anneal(self, pool: ThreadPoolExecutor, until: float) -> None:
        while self.fraction < until and not self.is_optimal:
            best = min(search.best for search in self.searches)
            open_searches = [search for search in self.searches if search.bound.seconds < best]
            search = min(open_searches, key=lambda each: (each.rounds, each.best))
            if len(open_searches) > 1 and search.rounds >= 4:  # the better one gets three rounds of four
                better = min(open_searches, key=lambda each: each.best)
                search = better if self.rng.random() < 0.75 else search
            left = None if self.budget.moves is None else self.budget.moves - self.moves_made
            self.moves_made += search.anneal(self.rng, pool, self.stop_moves, self._wait_until(until), left)
            self._report("annealing")

    def _wait_until(self, until: float) -> Callable[[list[Future[Any]]], None]:
        """A function that waits for tasks, and stops them when this fraction of the time is used."""

        def wait_for(tasks: list[Future[Any]]) -> None:
            left = None
            if self.budget.moves is None:
                left = max(until * self.budget.seconds - self._reserved - self.seconds, 0.0)
            _, running = wait(tasks, timeout=left)
            if running:
                self.stop_moves[0] = 1
                wait(running)
                self.stop_moves[0] = 0

        return wait_for

    def _raise_bound(self, search: PlacementSearch, part: float) -> None:
        """Spend at most this part of the time left on a better bound, or so many states per move."""
        before, moves = self.fraction, self.budget.moves

        def used(states: int) -> float:
            spent, most = (self.fraction - before, 1 - before) if moves is None else (states, moves)
            return spent / (part * most) if most else 1.0

        if search.bound.seconds < (best := min(each.best for each in self.searches)) < inf:
            search.raise_bound(best, used)
            self._report("orders of a few ranks")

    def _solve(self, search: PlacementSearch, part: float) -> None:
        self._report("exact solver")
        deterministic = self.budget.moves is not None
        seconds = part * (self.budget.moves or 0) / 20_000 if deterministic else part * self.budget.seconds
        effort = exact.Effort(seconds, deterministic, 1 if deterministic else usable_cores(), self.budget.seed)
        if seconds > 0:
            search.solve(effort, self.stop)
        if deterministic and self.budget.moves:
            self.moves_made += int(part * self.budget.moves)
        self._report("exact solver")

    # --- result ------------------------------------------------------------------------------------

    def _result(self) -> SearchResult:
        choice, quantile = self._best_choice()
        timeline = simulate(choice.schedule, self.costs, with_period=True)
        missing = [] if exact.available() else ["exact solver (ortools)"]
        missing += [] if COMPILED else ["compiled kernel (numba): moves are about 200 times slower without it"]
        return SearchResult(
            schedule=choice.schedule,
            timeline=timeline,
            objective=choice.search.problem.objective,
            value=choice.search.value_of(timeline),
            bound=min((each.bound for each in self.searches), key=lambda each: each.seconds),
            found_by=choice.found_by,
            families={name: value for each in self.searches for name, (_, value) in each.families.items()},
            too_large={name: size for each in self.searches for name, size in each.too_large.items()},
            skipped=tuple(dict.fromkeys(name for each in self.searches for name in each.skipped)),
            runs=sum(each.runs for each in self.searches),
            seconds=self.seconds,
            interrupted=self.interrupted,
            missing=tuple(missing),
            quantile=quantile,
        )

    def _best_choice(self) -> tuple[_FoundSchedule, float | None]:
        """The best schedule by its objective, or with jitter by its quantile, which is returned too."""
        choices = sorted(self._choices(), key=lambda choice: choice.value)
        if self.jitter is None:
            return choices[0], None
        schedules = [each.schedule for each in choices]
        best, quantile = self.jitter.best(
            schedules, self.costs, self.budget.seed, lambda: self.budget.is_over(self.seconds)
        )
        return choices[best], quantile

    def _choices(self) -> list[_FoundSchedule]:
        """The families that fit, and the best orders found."""
        found: list[_FoundSchedule] = []
        best = min((value for each in self.searches for _, value in each.families.values()), default=inf)
        for search in self.searches:
            for name, (schedule, value) in search.families.items():
                found.append(_FoundSchedule(value, f"family {name}", schedule, search))
            for candidate in search.kept[: _RANKED_UNDER_JITTER if self.jitter else 1]:
                if self.jitter is None and best <= candidate.value:
                    continue  # a family is as good
                schedule, value = search.problem.schedule_of(candidate.order, "searched")
                found.append(_FoundSchedule(value, candidate.found_by, schedule, search))
        return found
