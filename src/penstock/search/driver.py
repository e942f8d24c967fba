"""`search`: the best order of work for given costs and memory, and a proof of how good it is.

    families that fit, orders made by rules       ->  what a search starts from
    moves of single steps, on all cores           ->  better orders            (layer by layer, as long
    a constraint solver, where the size allows    ->  better orders, bounds     as there is time)

A result is never worse than a family that fits.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from threading import Event
from time import perf_counter
from typing import Any

import numpy as np

from penstock.cost.costs import Costs
from penstock.ir.schedule import Schedule
from penstock.search import exact
from penstock.search.kernel import COMPILED
from penstock.search.placement_search import Hunt, cores
from penstock.search.problem import Problem
from penstock.search.result import Progress, SearchResult
from penstock.search.steady_state import stretched
from penstock.simulation.jitter import jitter
from penstock.simulation.simulator import simulate

__all__ = ["Budget", "Noise", "run"]

_FOR_FEWER = 10.0
"""Seconds, at most, for an order of fewer microbatches whose middle is repeated."""

Told = Callable[[Progress], None]


@dataclass(frozen=True)
class Budget:
    """Seconds, or a number of moves with which the same seed gives the same answer."""

    seconds: float
    moves: int | None
    seed: int


@dataclass(frozen=True)
class Noise:
    """Schedules are ranked by what this share of runs stays within when steps vary by `share`."""

    share: float
    quantile: float


def run(
    problems: Sequence[Problem], costs: Costs, budget: Budget, noise: Noise | None, told: Told
) -> SearchResult:
    """Search all of them, and give the best of what was found; `costs` are those of the answer's timeline."""
    return _Search(problems, costs, budget, noise, told).run()


@dataclass(eq=False)
class _Search:
    problems: Sequence[Problem]
    costs: Costs
    budget: Budget
    noise: Noise | None
    told: Told
    hunts: list[Hunt] = field(default_factory=list)
    begun: float = field(default_factory=perf_counter)
    made: int = 0
    interrupted: bool = False
    stop: Event = field(default_factory=Event)
    stop_moves: Any = field(default_factory=lambda: np.zeros(1, dtype=np.int64))

    def run(self) -> SearchResult:
        self.rng = random.Random(self.budget.seed)  # noqa: S311 -- no secret
        self.hunts = [Hunt(problem) for problem in self.problems]
        try:
            self._search()
        except KeyboardInterrupt:
            if not any(hunt.kept for hunt in self.hunts):
                raise
            self.interrupted = True
        return self._result()

    # --- how much is left --------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        return perf_counter() - self.begun

    @property
    def share(self) -> float:
        """Of the budget that is used."""
        if self.budget.moves is not None:
            return min(self.made / self.budget.moves, 1.0) if self.budget.moves else 1.0
        return min(self.seconds / self.budget.seconds, 1.0) if self.budget.seconds else 1.0

    @property
    def done(self) -> bool:
        """Whether nothing is left to be found: no placement can beat the best of all."""
        best = min(hunt.best for hunt in self.hunts)
        return all(hunt.bound.seconds >= best * (1 - 1e-9) for hunt in self.hunts)

    def _late(self, until: float) -> bool:
        """Whether this share of the time is used; never where moves are counted."""
        return self.budget.moves is None and self.share >= until

    def _tell(self, doing: str) -> None:
        best = min(hunt.best for hunt in self.hunts)
        bound = min(hunt.bound.seconds for hunt in self.hunts)
        self.told(Progress(doing, best, bound, self.seconds, self.share))

    # --- layers ------------------------------------------------------------------------------------

    def _search(self) -> None:
        for number, hunt in enumerate(self.hunts):
            hunt.begin(partial(self._late, 0.5 * (number + 1) / len(self.hunts)))
            self._tell("families and rules")
        with ThreadPoolExecutor(cores() if COMPILED else 1) as pool:
            try:
                self._better(pool)
            finally:
                self.stop.set()
                self.stop_moves[0] = 1

    def _better(self, pool: ThreadPoolExecutor) -> None:
        for hunt in self.hunts:
            if not self.done:
                self._stretch(hunt)
        solvable = [hunt for hunt in self.hunts if hunt.can_be_solved and exact.available()]
        if solvable:
            self._improve(pool, until=0.15)
            for number, hunt in enumerate(solvable):
                if not self.done:
                    self._solve(hunt, (0.85 - self.share) / (len(solvable) - number))
        self._improve(pool, until=1.0)

    def _stretch(self, hunt: Hunt) -> None:
        """For many microbatches, orders of fewer with their middle repeated."""
        fewer = hunt.problem.with_few_microbatches()
        if fewer is None:
            return
        seconds, moves = self.budget.seconds, self.budget.moves
        part = 0.4 / len(self.hunts)
        budget = Budget(
            min(part * seconds, _FOR_FEWER), None if moves is None else int(part * moves), self.budget.seed
        )
        small = _Search([fewer], self.costs, budget, None, lambda _: self._tell("fewer microbatches"))
        small.hunts = [Hunt(fewer)]
        small.rng = self.rng
        small._search()
        self.made += small.made
        for candidate in small.hunts[0].kept[:4]:
            for order in stretched(fewer, candidate.order, hunt.problem):
                hunt.start_from(f"{candidate.found_by}, with its middle repeated", order)
        self._tell("fewer microbatches, repeated")

    def _improve(self, pool: ThreadPoolExecutor, until: float) -> None:
        while self.share < until and not self.done:
            live = [hunt for hunt in self.hunts if hunt.bound.seconds < min(each.best for each in self.hunts)]
            hunt = min(live, key=lambda each: (each.rounds, each.best))
            if len(live) > 1 and hunt.rounds >= 4:  # the better one gets three rounds of four
                hunt = min(live, key=lambda each: each.best) if self.rng.random() < 0.75 else hunt
            left = None if self.budget.moves is None else self.budget.moves - self.made
            self.made += hunt.round(self.rng, pool, self.stop_moves, self._wait_until(until), left)
            self._tell("moving steps")

    def _wait_until(self, until: float) -> Callable[[list[Future[Any]]], None]:
        """Wait for improvements, and end them when the time is over."""

        def waiting(tasks: list[Future[Any]]) -> None:
            left = None
            if self.budget.moves is None:
                left = max(until * self.budget.seconds - self.seconds, 0.0)
            _, running = wait(tasks, timeout=left)
            if running:
                self.stop_moves[0] = 1
                wait(running)
                self.stop_moves[0] = 0

        return waiting

    def _solve(self, hunt: Hunt, part: float) -> None:
        self._tell("the exact layer")
        counted = self.budget.moves is not None
        seconds = part * (self.budget.moves or 0) / 20_000 if counted else part * self.budget.seconds
        effort = exact.Effort(seconds, counted, 1 if counted else cores(), self.budget.seed)
        if seconds > 0:
            hunt.solve(effort, self.stop)
        if counted and self.budget.moves:
            self.made += int(part * self.budget.moves)
        self._tell("the exact layer")

    # --- the answer --------------------------------------------------------------------------------

    def _result(self) -> SearchResult:
        choices = sorted(self._choices(), key=lambda choice: choice[0])
        _, found_by, schedule, hunt = choices[0]
        quantile = None
        if self.noise is not None:
            spreads = [
                jitter(each[2], self.costs, noise=self.noise.share, seed=self.budget.seed).quantile(
                    self.noise.quantile
                )
                for each in choices
            ]
            quantile, best = min((spread, place) for place, spread in enumerate(spreads))
            _, found_by, schedule, hunt = choices[best]
        bound = min((each.bound for each in self.hunts), key=lambda each: each.seconds)
        timeline = simulate(schedule, self.costs, with_period=True)
        missing = [] if exact.available() else ["the exact layer (ortools)"]
        missing += [] if COMPILED else ["compiled loops (numba): moves are some 200 times slower without"]
        return SearchResult(
            schedule=schedule,
            timeline=timeline,
            objective=hunt.problem.objective,
            value=hunt.value_of(timeline),
            bound=bound,
            found_by=found_by,
            families={name: value for each in self.hunts for name, (_, value) in each.families.items()},
            too_large={name: size for each in self.hunts for name, size in each.too_large.items()},
            runs=sum(each.runs for each in self.hunts),
            seconds=self.seconds,
            interrupted=self.interrupted,
            missing=tuple(missing),
            quantile=quantile,
        )

    def _choices(self) -> list[tuple[float, str, Schedule, Hunt]]:
        """What there is to choose from: the best orders, and the families as they are."""
        found: list[tuple[float, str, Schedule, Hunt]] = []
        for hunt in self.hunts:
            for name, (schedule, value) in hunt.families.items():
                found.append((value, f"the family {name}", schedule, hunt))
            for candidate in hunt.kept[: 6 if self.noise else 1]:
                schedule = hunt.problem.schedule_of(candidate.order, "searched")
                value = hunt.value_of(simulate(schedule, hunt.problem.costs, with_period=True))
                found.append((value, candidate.found_by, schedule, hunt))
        return found
