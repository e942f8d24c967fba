"""The search of one placement: its problem, its bound, its best orders, and how they are improved."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event
from time import perf_counter

import numpy as np

from penstock.arguments import plural
from penstock.bounds import Bound, RankBounds, Workload, bounds
from penstock.compilation import COMPILED
from penstock.ir.encoding import Ints
from penstock.ir.kinds import Kind
from penstock.ir.schedule import Schedule
from penstock.search import exact
from penstock.search.annealing import anneal
from penstock.search.kernel_arrays import PAIRED
from penstock.search.problem import Problem
from penstock.search.result import gap_of
from penstock.search.seeds import family_builders, grouped_schedules, list_scheduled, serial
from penstock.simulation.simulator import simulate
from penstock.simulation.timeline import Timeline

_KEPT = 12
_TASKS = 4
"""Concurrent annealing runs; the same number on every machine, so that the same seed gives the same result."""
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
class Candidate:
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
    kept: list[Candidate] = field(default_factory=list)
    """The best orders, each with another value, best first."""
    starts: list[Candidate] = field(default_factory=list)
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
                candidate = Candidate(value, variant, f"{name} in pairs" if is_paired else name)
                self.starts.append(candidate)
                self.keep(candidate)

    def keep(self, candidate: Candidate) -> None:
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
            self.keep(Candidate(float(value), order, start.name, start.moves + made))
        self.rounds += 1
        return total

    def _submit(
        self, rng: random.Random, pool: ThreadPoolExecutor, moves: int, stop: Ints
    ) -> tuple[Candidate, Future[tuple[Ints, float, int, int]]]:
        """Start an annealing run with random parameters."""
        arrays, start = self.problem.arrays, self._choose_start(rng)
        temperature = rng.choice(_TEMPERATURES) * float(arrays.seconds.mean())
        focus, seed = rng.choice(_FOCUS), rng.randrange(1 << 30)
        objective = self.problem.objective_index
        return start, pool.submit(anneal, arrays, start.order, objective, moves, temperature, focus, seed, stop)

    def _choose_start(self, rng: random.Random) -> Candidate:
        """The best order, or with equal probability another of the best or a starting order."""
        chance = rng.random()
        return self.kept[0] if chance < 0.5 else rng.choice(self.kept if chance < 0.75 else self.starts)

    # --- proofs ------------------------------------------------------------------------------------

    def raise_bound(self, best: float, used: Callable[[int], float]) -> None:
        """Raise the bound, up to `best`, by all orders of a few ranks.

        `used` tells the share of the effort that is used, for a number of states.
        """
        few = RankBounds(self.work, self.problem.memory_limit, self.problem.objective)
        for bound in few.bounds(best, used):
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
                self.keep(Candidate(value, found.order, "exact solver"))
