"""One placement's part of a search: its problem, the best orders so far, and what is done to better them."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from threading import Event

import numpy as np

from penstock.bounds import Bound, Workload, bounds
from penstock.ir.action import Kind
from penstock.ir.schedule import Schedule
from penstock.ir.table import Ints
from penstock.search import exact
from penstock.search.annealing import improve
from penstock.search.kernel import COMPILED
from penstock.search.problem import Problem
from penstock.search.result import gap_of
from penstock.search.seeds import family_schedules, made, serial
from penstock.simulation.simulator import simulate
from penstock.simulation.timeline import Timeline

__all__ = ["Candidate", "Hunt", "cores"]

_KEPT = 12
_TASKS = 4
"""Improvements side by side; as many wherever it runs, so that the same seed gives the same answer."""
_WARMTH = (0.03, 0.1, 0.3, 1.0)
"""Of the mean step: how much worse an order may be and still be taken at first."""
_FOCUS = (0.5, 0.8)
"""The share of moves on the critical path."""
_SLOWER = 1 if COMPILED else 200
"""How much longer a move takes where it is not compiled."""
_LARGEST_EXACT = 400
"""Steps of a problem that the exact layer is tried on."""


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, eq=False)
class Candidate:
    """An order, what it comes to, and how it came about."""

    value: float
    order: Ints
    name: str
    moves: int = 0

    @property
    def found_by(self) -> str:
        """In words."""
        return f"{self.name}, then {self.moves:,} moves" if self.moves else self.name


@dataclass(eq=False)
class Hunt:
    """The best orders of one problem so far."""

    problem: Problem
    bound: Bound = field(init=False)
    kept: list[Candidate] = field(default_factory=list)
    """The best, each of another value, best first."""
    starts: list[Candidate] = field(default_factory=list)
    """Where restarts begin."""
    families: dict[str, tuple[Schedule, float]] = field(default_factory=dict)
    """Those that fit, as they are, with their objective."""
    too_large: dict[str, float] = field(default_factory=dict)
    runs: int = 0
    rounds: int = 0

    def __post_init__(self) -> None:
        self.bound = bounds(self.work, self.problem.memory_limit, self.problem.objective)[0]

    @property
    def work(self) -> Workload:
        """What has to be done."""
        problem = self.problem
        return Workload(problem.placement, problem.microbatches, problem.costs, split=problem.split)

    @property
    def best(self) -> float:
        """The least objective of any order or family."""
        family = min((value for _, value in self.families.values()), default=float("inf"))
        return min(family, self.kept[0].value if self.kept else float("inf"))

    def value_of(self, timeline: Timeline) -> float:
        """The objective of a timeline."""
        value: float = getattr(timeline, self.problem.objective)
        return value

    # --- starting ----------------------------------------------------------------------------------

    def begin(self, late: Callable[[], bool]) -> None:
        """Families that fit, and orders made by rules, the latter as long as it is not late."""
        self.start_from(*serial(self.problem))
        for schedule in family_schedules(self.problem):
            order = self.problem.order_of(schedule)
            self.start_from(schedule.name, order)
            if not self.problem.split and schedule.table.has(Kind.I, Kind.W):
                continue
            timeline = simulate(schedule, self.problem.costs, with_period=self.problem.objective == "period")
            peaks = np.array(timeline.peak_memory)
            if (peaks - self.problem.fixed <= self.problem.tables.limits).all():
                self.families[schedule.name] = (schedule, self.value_of(timeline))
            else:
                self.too_large[schedule.name] = float(peaks.max())
        if self.pairs_pay:
            work = replace(self.work, paired=True)
            self.bound = bounds(work, self.problem.memory_limit, self.problem.objective)[0]
        if gap_of(self.best, self.bound.seconds):
            for seed in made(self.problem, late):
                self.start_from(*seed)

    @property
    def pairs_pay(self) -> bool:
        """Whether a family that fits runs overlapped pairs, and those can take less than their parts."""
        costs = self.problem.costs
        cheaper = costs.overlap is not None or costs.overlap_factor < 1 or costs.launch_overhead > 0
        return cheaper and any(_has_pairs(schedule) for schedule, _ in self.families.values())

    def start_from(self, name: str, order: Ints) -> None:
        """Add an order, if it fits and runs."""
        if self.problem.fits(order) and (value := self.problem.value(order)) < float("inf"):
            candidate = Candidate(value, order, name)
            self.starts.append(candidate)
            self.keep(candidate)

    def keep(self, candidate: Candidate) -> None:
        """Among the best, unless there is one just as good."""
        close = 1e-9 * abs(candidate.value)
        if any(abs(other.value - candidate.value) <= close for other in self.kept):
            return
        self.kept = sorted([*self.kept, candidate], key=lambda each: each.value)[:_KEPT]

    # --- bettering ---------------------------------------------------------------------------------

    @property
    def moves(self) -> int:
        """How many moves an improvement of the next round makes: the more rounds, the longer."""
        first = min(max(15_000_000 // self.problem.tables.bounds[-1], 1000), 50_000)
        return int(first * min(1 << (self.rounds // 2), 32)) // _SLOWER or 1

    def round(
        self,
        rng: random.Random,
        pool: ThreadPoolExecutor,
        stop: Ints,
        wait: Callable[..., None],
        most: int | None,
    ) -> int:
        """A few improvements side by side, of at most so many moves together; gives their number."""
        moves, tables = self.moves, self.problem.tables
        if most is not None:
            moves = min(moves, -(-most // _TASKS))
        self.starts = sorted(self.starts, key=lambda each: each.value)[: 2 * _KEPT]
        step = float(tables.seconds.mean())
        tasks = []
        for _ in range(_TASKS):
            chance = rng.random()
            start = self.kept[0] if chance < 0.5 else rng.choice(self.kept if chance < 0.75 else self.starts)
            warmth, focus, seed = rng.choice(_WARMTH) * step, rng.choice(_FOCUS), rng.randrange(1 << 30)
            given = (tables, start.order, self.problem.goal, moves, warmth, focus, seed, stop)
            tasks.append((start, pool.submit(improve, *given)))
        wait([task for _, task in tasks])
        total = 0
        for start, task in tasks:
            order, value, tried, runs = task.result()
            self.runs += runs
            total += tried
            self.keep(Candidate(float(value), order, start.name, start.moves + tried))
        self.rounds += 1
        return total

    # --- proving -----------------------------------------------------------------------------------

    @property
    def can_be_solved(self) -> bool:
        """Whether the exact layer is worth a try, and what it proves holds for whole backwards too."""
        tables = self.problem.tables
        return bool(tables.bounds[-1] <= _LARGEST_EXACT) and not tables.joins and not self.pairs_pay

    def solve(self, effort: exact.Effort, stop: Event) -> None:
        """Let the exact layer look for a better order, and a better bound."""
        found = exact.solve(self.problem, self.kept[0].order, self.bound.seconds, effort, stop)
        if gap_of(found.bound, self.bound.seconds):
            self.bound = Bound(found.bound, "exact", "a solver has gone through all orders")
        if found.order is not None and self.problem.fits(found.order):
            value = self.problem.value(found.order)
            if value < self.kept[0].value:
                self.keep(Candidate(value, found.order, "the exact layer"))


def _has_pairs(schedule: Schedule) -> bool:
    slot = schedule.table.slot
    return bool((slot[1:] == slot[:-1]).any())
