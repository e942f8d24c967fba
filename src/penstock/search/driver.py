"""The search drivers: run the layers of a search on every placement until the budget is used.

Search of orders:

    families and list scheduling     ->  starting orders
    simulated annealing, all cores   ->  better orders
    all orders of a few ranks        ->  better bounds
    CP-SAT, where the size allows    ->  better orders, better bounds

Search with memory policies, which also decides which microbatches of which stages are recomputed or offloaded:

    orders      families, the serial order, the best orders within the limit, without a limit, and those with
                every microbatch recomputed
    policies    `FitMemory` on each of them: simple policies, then all policies, for the best orders first
    moves       from the best that fit: memory actions of single microbatches more or less, actions shifted;
                every one is simulated

What is promised of the results, and why, is in `docs/search_method.md`.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from math import inf
from time import perf_counter
from typing import NamedTuple

import numpy as np

from penstock.arguments import plural
from penstock.bounds import Bound, Workload, bounds, least_needed, rank_bounds
from penstock.compilation import COMPILED
from penstock.cost.costs import Costs
from penstock.cost.effects import held_bytes
from penstock.cost.memory import exceeds, fixed_bytes
from penstock.cost.prices import action_seconds
from penstock.errors import ScheduleError, SearchError
from penstock.ir.encoding import (
    JOINED,
    KIND_MASK,
    KIND_SHIFT,
    MICROBATCH_MASK,
    MICROBATCH_SHIFT,
    STAGE_MASK,
    STAGE_SHIFT,
    Ints,
    code_of,
)
from penstock.ir.kinds import MEMORY_KINDS, Kind
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.processes import usable_cores
from penstock.search import exact
from penstock.search.kernel import PAIRED, anneal
from penstock.search.passes import FitMemory, without_memory_actions
from penstock.search.problem import Problem
from penstock.search.request import Budget, Jitter, OnProgress, Progress, SearchResult
from penstock.search.seeds import (
    family_builders,
    grouped_schedules,
    list_scheduled,
    serial,
)
from penstock.simulation.simulator import Simulator, simulate
from penstock.simulation.timeline import Timeline
from penstock.validation import validate


class _Choice(NamedTuple):
    value: float
    found_by: str
    schedule: Schedule


@dataclass(eq=False)
class _Search(ABC):
    """What both searches have: problems, a budget, and a result."""

    problems: Sequence[Problem]
    costs: Costs
    """Costs of the result's timeline."""
    budget: Budget
    jitter: Jitter | None
    on_progress: OnProgress
    started: float = field(default_factory=perf_counter)
    moves_made: int = 0
    interrupted: bool = False
    families: dict[str, float] = field(default_factory=dict)
    """The objective of every family that fits."""
    too_large: dict[str, float] = field(default_factory=dict)
    """Peak memory of the others."""
    skipped: list[str] = field(default_factory=list)
    """Families and orders for which there was no time."""
    runs: int = 0

    @cached_property
    def rng(self) -> random.Random:
        return random.Random(self.budget.seed)  # noqa: S311 -- no secret

    @property
    def seconds(self) -> float:
        return perf_counter() - self.started

    @property
    def fraction(self) -> float:
        """The share of the budget that is used, or needed to make the result."""
        return self.budget.fraction(self.seconds + self._reserved, self.moves_made)

    @property
    def _reserved(self) -> float:
        """Seconds to make the result."""
        return 0.0

    @abstractmethod
    def search(self) -> None: ...

    @property
    @abstractmethod
    def best(self) -> float:
        """The lowest objective so far; infinite without a schedule."""

    @property
    @abstractmethod
    def bound(self) -> Bound: ...

    @abstractmethod
    def choices(self) -> list[_Choice]:
        """The schedules to choose the result from."""

    def run(self) -> SearchResult:
        try:
            self.search()
        except KeyboardInterrupt:
            if self.best == inf:
                raise
            self.interrupted = True
        return self.result()

    def _report(self, phase: str) -> None:
        self.on_progress(Progress(phase, self.best, self.bound.seconds, self.seconds, self.fraction))

    def result(self) -> SearchResult:
        """The best choice; with jitter, the one with the lowest quantile."""
        choices = sorted(self.choices(), key=lambda choice: choice.value)
        position, quantile = 0, None
        if self.jitter is not None:
            seed, is_over = self.budget.seed, lambda: self.budget.is_over(self.seconds)
            schedules = [each.schedule for each in choices]
            position, quantile = self.jitter.best(schedules, self.costs, seed, is_over)
        best = choices[position]
        timeline = simulate(best.schedule, self.costs, with_period=True)
        objective = self.problems[0].objective
        missing = [] if exact.available() else ["exact solver (ortools)"]
        missing += [] if COMPILED else ["compiled kernel (numba): moves are about 200 times slower without it"]
        return SearchResult(
            schedule=best.schedule,
            timeline=timeline,
            objective=objective,
            value=timeline.length(objective),
            bound=self.bound,
            found_by=best.found_by,
            families=self.families,
            too_large=self.too_large,
            skipped=tuple(dict.fromkeys(self.skipped)),
            runs=self.runs,
            seconds=self.seconds,
            interrupted=self.interrupted,
            missing=tuple(missing),
            quantile=quantile,
        )


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
        self.bound = bounds(self.problem.work, self.problem.memory_limit, self.problem.objective)[0]

    @property
    def best(self) -> float:
        """The lowest objective of any order or family."""
        return min(
            [value for _, value in self.families.values()] + [each.value for each in self.kept], default=inf
        )

    # --- starting orders ---------------------------------------------------------------------------

    def add_seeds(self, is_late: Callable[[], bool], is_over: Callable[[], bool]) -> None:
        """Add the serial order and families; unless one is optimal, groups and list scheduling too.

        When it is over, no family is added except for the first that fits, and when it is late, nothing else.
        """
        self.add_start("serial order", serial(self.problem))
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
        if self.bound.gap(self.best):
            for schedule in grouped_schedules(self.problem):
                if not is_late():
                    self.add_start(schedule.name, self.problem.order_of(schedule))
            for order in list_scheduled(self.problem, is_late):
                self.add_start("list scheduling", order)

    def add_family(self, schedule: Schedule) -> None:
        """Evaluate a family as it is; it is kept if it fits."""
        timeline = simulate(schedule, self.problem.costs, with_period=self.problem.objective == "period")
        peaks, fixed = np.array(timeline.peak_memory), fixed_bytes(self.problem.costs, self.problem.placement)
        if (peaks - fixed <= self.problem.arrays.memory_limits).all():
            self.families[schedule.name] = (schedule, timeline.length(self.problem.objective))
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
            if self.problem.fits(variant) and (value := self.problem.value(variant)) < inf:
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
        seconds: float | None,
        most: int | None,
    ) -> int:
        """One round of concurrent annealing runs, within `seconds` and `most` moves; returns the moves made."""
        moves = self.moves_per_run if most is None else min(self.moves_per_run, -(-most // _TASKS))
        self.starts = sorted(self.starts, key=lambda each: each.value)[: 2 * _KEPT]
        tasks = []
        for _ in range(_TASKS):
            chance = rng.random()
            start = self.kept[0] if chance < 0.5 else rng.choice(self.kept if chance < 0.75 else self.starts)
            temperature = rng.choice(_TEMPERATURES) * float(self.problem.arrays.seconds.mean())
            chosen = temperature, rng.choice(_FOCUS), rng.randrange(1 << 30)
            given = self.problem.arrays, start.order, self.problem.objective_index, moves
            tasks.append((start, pool.submit(anneal, *given, *chosen, stop)))
        _, running = wait([task for _, task in tasks], timeout=seconds)
        if running:
            stop[0] = 1
            wait(running)
            stop[0] = 0
        total = 0
        for start, task in tasks:
            order, value, made, runs = task.result()
            self.runs += runs
            total += made
            self.keep(FoundOrder(float(value), order, start.name, start.moves + made))
        self.rounds += 1
        return total

    # --- proofs ------------------------------------------------------------------------------------

    @property
    def is_solvable(self) -> bool:
        """Whether the problem is small enough for the exact solver."""
        steps, m = self.problem.arrays.rank_bounds[-1], self.problem.microbatches
        pairs = sum((len(own) * m) ** 2 for own in self.problem.placement.stages_of_rank)
        return bool(steps <= _MAX_SOLVED_STEPS) and (pairs <= _MAX_SOLVED_PAIRS or not self.problem.can_pair)

    def solve(self, effort: exact.Effort) -> None:
        """Run the exact solver for a better order and a better bound."""
        found = exact.solve(self.problem, self.kept[0].order, self.bound.seconds, effort)
        if self.bound.gap(found.bound):
            self.bound = Bound(
                found.bound, "exact", "proved by the exact solver for all orders, microbatches in any order"
            )
        if found.order is not None and self.problem.fits(found.order):
            value = self.problem.value(found.order)
            if value < self.kept[0].value:
                self.keep(FoundOrder(value, found.order, "exact solver"))


_FEW_RANKS_PART = 0.25
"""Of the time that is left after a first annealing, for bounds from a few ranks; states per move otherwise."""
_RANKED_UNDER_JITTER = 6
"""Orders per placement that are simulated with jitter."""
_JITTER_PART = 0.3
"""Of the time limit, for the simulation of these."""
_RESULT_FAMILIES = 3.0
"""Time that is left at the end, in times to evaluate a family: one is evaluated, and the result takes two."""


def run(
    problems: Sequence[Problem],
    costs: Costs,
    budget: Budget,
    jitter: Jitter | None,
    on_progress: OnProgress,
    fit: FitMemory | None = None,
) -> SearchResult:
    """Search all problems, with `fit` its memory policies too; the best schedule is simulated with `costs`.

    Raises if even the least that a policy leaves exceeds the limit on a rank.
    """
    if fit is None:
        compile_kernels()
        return _OrderSearch(problems, costs, budget, jitter, on_progress).run()
    _require_feasible(problems, fit)
    return _PolicySearch(problems, costs, budget, jitter, on_progress, fit=fit).run()


@cache
def compile_kernels() -> None:
    """Compile everything that searches run, or load it from the cache on disk.

    The smallest problem is run once, so that the time limit of a search does not include compilation.
    """
    problem = Problem(Placement((0,)), 1, Costs())
    order = next(list_scheduled(problem, lambda: False))
    if problem.fits(order):
        anneal(problem.arrays, order, 0, 1, 1.0, 1.0, 0, np.zeros(1, np.int64))


@dataclass(eq=False)
class _OrderSearch(_Search):
    searches: list[PlacementSearch] = field(init=False)
    stop: Ints = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    """Of annealing runs; see `anneal`."""

    def __post_init__(self) -> None:
        self.searches = [PlacementSearch(problem) for problem in self.problems]

    @property
    def _reserved(self) -> float:
        """Seconds to make the result: much of the limit where an order has millions of steps."""
        ranking = 0.0 if self.jitter is None else _JITTER_PART * self.budget.seconds
        return ranking + _RESULT_FAMILIES * max(search.family_seconds for search in self.searches)

    @property
    def best(self) -> float:
        return min(search.best for search in self.searches)

    @property
    def bound(self) -> Bound:
        return min((each.bound for each in self.searches), key=lambda each: each.seconds)

    @property
    def is_optimal(self) -> bool:
        """Whether no placement can have a better schedule than the best so far."""
        best = self.best
        return all(search.bound.seconds >= best * (1 - 1e-9) for search in self.searches)

    def _is_late(self, until: float) -> bool:
        """Whether this fraction of the time is used; never with a budget of moves."""
        return self.budget.moves is None and self.fraction >= until

    # --- layers ------------------------------------------------------------------------------------

    def search(self) -> None:
        for number, search in enumerate(self.searches):
            part = (number + 1) / len(self.searches)
            search.add_seeds(partial(self._is_late, 0.5 * part), partial(self._is_late, part))
            self._report("families and list scheduling")
        with ThreadPoolExecutor(usable_cores() if COMPILED else 1) as pool:
            try:
                self._optimize(pool)
            finally:
                self.stop[0] = 1

    def _optimize(self, pool: ThreadPoolExecutor) -> None:
        self._anneal(pool, until=0.15)
        for number, search in enumerate(self.searches):
            if not (self._is_late(1.0) or self.is_optimal):
                self._raise_bound(search, _FEW_RANKS_PART / (len(self.searches) - number))
        solvable = [search for search in self.searches if search.is_solvable and exact.available()]
        for number, search in enumerate(solvable):
            if not self.is_optimal:
                self._solve(search, max(0.85 - self.fraction, 0.0) / (len(solvable) - number))
        self._anneal(pool, until=1.0)

    def _anneal(self, pool: ThreadPoolExecutor, until: float) -> None:
        while self.fraction < until and not self.is_optimal:
            best = self.best
            open_searches = [search for search in self.searches if search.bound.seconds < best]
            search = min(open_searches, key=lambda each: (each.rounds, each.best))
            if len(open_searches) > 1 and search.rounds >= 4:  # the better one gets three rounds of four
                better = min(open_searches, key=lambda each: each.best)
                search = better if self.rng.random() < 0.75 else search
            moves = seconds = None
            if self.budget.moves is None:
                seconds = max(until * self.budget.seconds - self._reserved - self.seconds, 0.0)
            else:
                moves = self.budget.moves - self.moves_made
            self.moves_made += search.anneal(self.rng, pool, self.stop, seconds, moves)
            self._report("annealing")

    def _raise_bound(self, search: PlacementSearch, part: float) -> None:
        """Raise the bound by all orders of a few ranks, with this part of the time left, or states per move."""
        before, moves, problem = self.fraction, self.budget.moves, search.problem

        def used(states: int) -> float:
            spent, most = (self.fraction - before, 1 - before) if moves is None else (states, moves)
            return spent / (part * most) if most else 1.0

        if search.bound.seconds < (best := self.best) < inf:
            for bound in rank_bounds(problem.work, problem.memory_limit, problem.objective, best, used):
                if search.bound.gap(bound.seconds):
                    search.bound = bound
            self._report("orders of a few ranks")

    def _solve(self, search: PlacementSearch, part: float) -> None:
        self._report("exact solver")
        deterministic = self.budget.moves is not None
        seconds = part * (self.budget.moves or 0) / 20_000 if deterministic else part * self.budget.seconds
        effort = exact.Effort(seconds, deterministic, 1 if deterministic else usable_cores(), self.budget.seed)
        if seconds > 0:
            search.solve(effort)
        if deterministic and self.budget.moves:
            self.moves_made += int(part * self.budget.moves)
        self._report("exact solver")

    # --- result ------------------------------------------------------------------------------------

    def choices(self) -> list[_Choice]:
        """The families that fit, and the best orders found."""
        found: list[_Choice] = []
        best = min((value for each in self.searches for _, value in each.families.values()), default=inf)
        for search in self.searches:
            for name, (schedule, value) in search.families.items():
                self.families[name] = value
                found.append(_Choice(value, f"family {name}", schedule))
            self.too_large |= search.too_large
            self.skipped += search.skipped
            self.runs += search.runs
            for candidate in search.kept[: _RANKED_UNDER_JITTER if self.jitter else 1]:
                if self.jitter is None and best <= candidate.value:
                    continue  # a family is as good
                schedule, value = search.problem.schedule_of(candidate.order, "searched")
                found.append(_Choice(value, candidate.found_by, schedule))
        return found


def _relaxed_workload(problem: Problem, fit: FitMemory) -> Workload:
    """The work of which every memory policy is one case, for lower bounds."""
    return replace(problem.work, may_recompute=fit.recompute, may_offload=fit.offload)


def _require_feasible(problems: Sequence[Problem], fit: FitMemory) -> None:
    """Raise if no placement has a schedule that fits, whatever is recomputed or offloaded."""
    works = (_relaxed_workload(problem, fit) for problem in problems)
    needs = [max((need, -rank) for rank, need in enumerate(least_needed(work))) for work in works]
    if all(exceeds(need, fit.memory_limit) for need, _ in needs):
        (need, rank), units = min(needs), fit.costs.units
        raise SearchError(
            f"no schedule fits the memory limit of {units.memory(fit.memory_limit)} per rank: rank {-rank} "
            f"needs {units.memory(need)} "
            "for parameters, gradients, optimizer state and one backward, whatever is recomputed or offloaded"
        )


def _plain_order(problem: Problem, schedule: Schedule) -> Schedule:
    """The order of a family, without its copies to the host.

    Backwards are fused if they may not be split, and pairs that save only a launch are separated.
    """
    if schedule.table.has(Kind.OFFLOAD):
        schedule = without_memory_actions(schedule).renamed(f"order of {schedule.name}")
    if problem.split and (problem.can_pair or not schedule.table.has_pairs):
        return schedule
    return problem.fused_schedule(problem.order_of(schedule), schedule.name)


def _name_with_policy(schedule: Schedule) -> str:
    """The name of an order, and how often it has each memory action."""
    counts = {kind: int(schedule.table.of_kind(kind).sum()) for kind in MEMORY_KINDS[:2]}
    texts = [f"{count} {kind.value}" for kind, count in counts.items() if count]
    return f"{schedule.name} with {' and '.join(texts)}" if texts else schedule.name


def _problems_to_order(problems: Sequence[Problem], *, recompute: bool) -> dict[str, list[Problem]]:
    """Problems without memory actions: within the limit, without a limit, and with everything recomputed."""
    again = [made for each in problems if (made := _recomputed(each)) and _can_fit(made)]
    return {
        "within the limit": [each for each in problems if _can_fit(each)],
        "without a limit": [replace(each, memory_limit=None) for each in problems],
        "with all recomputed": again if recompute else [],
    }


def _can_fit(problem: Problem) -> bool:
    return problem.fits(serial(problem))


def _recomputed(problem: Problem) -> Problem | None:
    """The problem with every microbatch recomputed: its backward is longer, and it holds the checkpoint.

    The rest of one activation at a time is left free. None if no memory remains.
    """
    costs, n = problem.costs, problem.placement.num_stages
    full, kept = held_bytes(costs, n), held_bytes(costs, n, (Kind.RECOMPUTE,))
    limit = float(problem.memory_limit or 0) - float((full - kept).max())
    return replace(problem, costs=recomputed_costs(costs, n), memory_limit=limit) if limit > 0 else None


def recomputed_costs(costs: Costs, num_stages: int) -> Costs:
    """The costs of stages whose backward begins with a RECOMPUTE, and that hold the checkpoint until then.

    The seconds of RECOMPUTE, its all-to-all included, are part of the compute of I and of B.
    """
    again = action_seconds(costs, num_stages)[Kind.RECOMPUTE.number] + costs.launch_overhead
    backward_input, backward = (
        tuple((np.array(costs.resolved(name, num_stages)) + again).tolist())
        for name in ("backward_input", "backward")
    )
    return replace(
        costs,
        backward_input=backward_input,
        backward=backward,
        activation=tuple(held_bytes(costs, num_stages, (Kind.RECOMPUTE,)).tolist()),
        activation_freed_by_input=0,
        checkpoint=0,
        offloadable=None,
    )


# Moves: recompute or offload one microbatch of one stage more or less, or shift one action.
#
#     recompute   add a RECOMPUTE directly before the backward, or remove it
#     offload     add an OFFLOAD directly after F and a RELOAD a few steps before its use, or remove both
#     shift       move one action of a rank past its neighbours
#
# A move keeps the order of the actions of a stage and microbatch, and of the microbatches of a kind and stage.
# So every list stays in a valid order; the simulator says whether the ranks wait for each other in a cycle.


_FARTHEST = 6
"""Places by which a RELOAD is ahead of its use, or an action is shifted, at most."""


class PolicyMoves:
    """Random moves on schedules of the same stages, placement and microbatches."""

    def __init__(self, schedule: Schedule, rng: random.Random, *, recompute: bool, offload: bool) -> None:
        self._placement, self._microbatches, self._rng = schedule.placement, schedule.microbatches, rng
        self._moves = [*[self._recompute] * recompute, *[self._offload] * offload, self._shift]

    def changed(self, schedule: Schedule) -> Schedule | None:
        """The schedule after one move; None if the move is not possible."""
        rows = [row.tolist() for row in schedule.table.rows]
        rank = self._rng.randrange(len(rows))
        steps: list[list[int]] = []
        for code in rows[rank]:
            if code & JOINED:
                steps[-1].append(code)
            else:
                steps.append([code])
        changed = self._rng.choice(self._moves)(steps, rank)
        if changed is None:
            return None
        rows[rank] = [code for step in changed for code in step]
        return schedule.with_rows(rows)

    def _unit(self, rank: int) -> tuple[int, int]:
        stages = self._placement.stages_of_rank[rank]
        return self._rng.choice(stages), self._rng.randrange(self._microbatches)

    def _recompute(self, steps: list[list[int]], rank: int) -> list[list[int]]:
        unit = self._unit(rank)
        again = [code_of(Kind.RECOMPUTE, *unit)]
        if again in steps:
            return [step for step in steps if step != again]
        use = _place(steps, unit, Kind.I, Kind.B)
        return [*steps[:use], again, *steps[use:]]

    def _offload(self, steps: list[list[int]], rank: int) -> list[list[int]]:
        unit = self._unit(rank)
        offload, reload, again = (
            [code_of(kind, *unit)] for kind in (Kind.OFFLOAD, Kind.RELOAD, Kind.RECOMPUTE)
        )
        if offload in steps:
            return [step for step in steps if step not in (offload, reload)]
        use = steps.index(again) if again in steps else _place(steps, unit, Kind.I, Kind.B)
        after = _place(steps, unit, Kind.F) + 1
        before = max(after, use - self._rng.randrange(_FARTHEST))
        return [*steps[:after], offload, *steps[after:before], reload, *steps[before:]]

    def _shift(self, steps: list[list[int]], rank: int) -> list[list[int]] | None:
        """Move one step past up to some neighbours."""
        del rank
        place, places = self._rng.randrange(len(steps)), self._rng.randrange(1, _FARTHEST)
        if self._rng.random() < 0.5:
            first, last = max(place - places, 0), place
            changed = [*steps[:first], steps[place], *steps[first:last], *steps[last + 1 :]]
        else:
            first, last = place + 1, min(place + 1 + places, len(steps))
            changed = [*steps[:place], *steps[first:last], steps[place], *steps[last:]]
        passed = [code for step in steps[first:last] for code in step]
        return None if not passed or any(_are_ordered(a, b) for a in steps[place] for b in passed) else changed


def _are_ordered(one: int, two: int) -> bool:
    """Whether the order of two actions of a rank has to stay: same stage, and same microbatch or same kind."""
    same_stage = one >> STAGE_SHIFT & STAGE_MASK == two >> STAGE_SHIFT & STAGE_MASK
    same_microbatch = one >> MICROBATCH_SHIFT & MICROBATCH_MASK == two >> MICROBATCH_SHIFT & MICROBATCH_MASK
    return same_stage and (same_microbatch or one >> KIND_SHIFT & KIND_MASK == two >> KIND_SHIFT & KIND_MASK)


def _place(steps: Sequence[Sequence[int]], unit: tuple[int, int], *kinds: Kind) -> int:
    """The place of the step that has an action of one of these kinds for a stage and microbatch."""
    codes = {code_of(kind, *unit) for kind in kinds}
    return next(i for i, step in enumerate(steps) if any(code & ~JOINED in codes for code in step))


def _timeline_of(schedule: Schedule, costs: Costs, objective: str) -> Timeline | None:
    """The timeline of an order that can deadlock; None if it does."""
    try:
        simulator = Simulator(schedule, costs)
    except ScheduleError:  # no messages can be added to what deadlocks
        return None
    done = simulator.run()
    if np.min(done.end, initial=0) < 0:
        return None
    return simulator.timeline(done, with_period=objective == "period")


_KERNEL_MOVES = 200
"""Moves of the compiled kernel that a simulated move counts as."""
_MOVES_PER_START = 200
_KEPT_WITH_POLICIES = 6
_SHARE_OF_POLICIES = 0.8
"""Of the time; then no policy is tried any more, but for a first one that fits."""
_SHARE_OF_ORDERS = 0.4
"""Of the budget, for searching orders by themselves."""


@dataclass(frozen=True, eq=False)
class _Fitted:
    """A schedule that fits."""

    timeline: Timeline
    value: float
    score: tuple[float, int]
    found_by: str


@dataclass(eq=False, kw_only=True)
class _PolicySearch(_Search):
    fit: FitMemory
    kept: list[_Fitted] = field(default_factory=list)

    def search(self) -> None:
        self._fit_all(self._simply_fitted())
        self._move()

    @property
    def best(self) -> float:
        return self.kept[0].value if self.kept else inf

    @cached_property
    def bound(self) -> Bound:
        """For every order and every memory policy."""
        fit = self.fit
        works = (_relaxed_workload(problem, fit) for problem in self.problems)
        return min(bounds(work, fit.memory_limit, fit.objective)[0] for work in works)

    # --- orders ------------------------------------------------------------------------------------

    def _orders(self) -> Iterator[Schedule]:
        """Families, the serial order, and orders that the kernel finds, which knows no memory actions."""
        for problem in self.problems:
            yield problem.fused_schedule(serial(problem), "serial order")
            for name, builder in family_builders(problem, offloading=True).items():
                if self._has_no_time_left():
                    self.skipped.append(name)
                elif (schedule := builder()) is not None:
                    if schedule.table.has(Kind.OFFLOAD) and self.fit.offload and problem.split:
                        self._try_as_it_is(schedule)
                    yield _plain_order(problem, schedule)
        for what, problems in _problems_to_order(self.problems, recompute=self.fit.recompute).items():
            if not problems or self._is_done or self._is_late():
                continue
            self._report(f"orders {what}")
            budget = self.budget.part(_SHARE_OF_ORDERS / 3)
            found = run(problems, problems[0].costs, budget, None, lambda _: None)
            self.runs += found.runs
            self.moves_made += budget.moves or 0
            yield found.schedule.renamed(f"order searched {what}")

    def _try_as_it_is(self, schedule: Schedule) -> None:
        """A family that has memory actions of its own."""
        timeline = simulate(schedule, self.fit.costs, with_period=True)
        self._keep(timeline, schedule.name)
        if self.fit.fits(timeline):
            self.families[schedule.name] = self._value(timeline)
        else:
            self.too_large[schedule.name] = max(timeline.peak_memory)

    @property
    def _is_done(self) -> bool:
        return bool(self.kept) and not self.bound.gap(self.best)

    # --- policies ----------------------------------------------------------------------------------

    def _simply_fitted(self) -> dict[Schedule, float]:
        """The simplest policies for every order; return the best value of each order."""
        values: dict[Schedule, float] = {}
        for schedule in self._orders():
            if schedule not in values and not self._has_no_time_left():
                timeline = self.fit.fitted_simply(schedule, self._has_no_time_left)
                values[schedule] = inf if timeline is None else self._value(timeline)
                if timeline is not None:
                    self._keep(timeline, _name_with_policy(timeline.schedule))
        return values

    def _fit_all(self, values: dict[Schedule, float]) -> None:
        """All policies, for the best orders first."""
        for schedule in sorted(values, key=lambda each: values[each]):
            if self._is_done:
                break
            if self._has_no_time_left():
                self.skipped.append(schedule.name)
                continue
            try:
                timeline = self.fit.fitted(schedule, self._is_late)
            except SearchError:
                self.too_large[schedule.name] = max(simulate(schedule, self.fit.costs).peak_memory)
            else:
                name = _name_with_policy(timeline.schedule)
                self.runs += 1
                self._keep(timeline, name)
                self.families.setdefault(name, self._value(timeline))
            self._report("policies")

    def _has_no_time_left(self) -> bool:
        """Whether it is late, and something fits."""
        return bool(self.kept) and self._is_late()

    def _is_late(self) -> bool:
        """Whether the time for policies is used; never with a budget of moves."""
        return self.budget.moves is None and self.fraction >= _SHARE_OF_POLICIES

    def _move(self) -> None:
        """Anneal from the best orders until the budget is used or the best is optimal."""
        while self.fraction < 1 and not self._is_done and self.kept:
            self._anneal(self.kept[0] if self.rng.random() < 0.5 else self.rng.choice(self.kept))
            self._report("moves")

    def _anneal(self, start: _Fitted) -> None:
        fit, rng, now = self.fit, self.rng, start
        made = PolicyMoves(start.timeline.schedule, rng, recompute=fit.recompute, offload=fit.offload)
        temperature = rng.choice((0.0, 0.003, 0.01)) * start.value
        for _ in range(_MOVES_PER_START):
            self.moves_made += _KERNEL_MOVES
            if self.fraction >= 1:
                return
            changed = made.changed(now.timeline.schedule)
            self.runs += changed is not None
            timeline = None if changed is None else _timeline_of(changed, fit.costs, fit.objective)
            if timeline is None or not fit.fits(timeline):
                continue
            other = self._fitted(timeline, f"{start.found_by}, then moves")
            if other.value <= now.value + temperature * rng.random() and not validate(timeline.schedule):
                now = other
                if other.score < self.kept[0].score:
                    self._keep(timeline, other.found_by)

    def _keep(self, timeline: Timeline, found_by: str) -> None:
        """Keep a schedule that fits, if it is valid and among the best."""
        is_known = any(timeline.schedule == other.timeline.schedule for other in self.kept)
        if self.fit.fits(timeline) and not is_known:
            found = self._fitted(timeline, found_by)
            self.kept = sorted([*self.kept, found], key=lambda each: each.score)[:_KEPT_WITH_POLICIES]

    def _fitted(self, timeline: Timeline, found_by: str) -> _Fitted:
        return _Fitted(timeline, self._value(timeline), self.fit.score(timeline), found_by)

    def _value(self, timeline: Timeline) -> float:
        return timeline.length(self.fit.objective)

    # --- result ------------------------------------------------------------------------------------

    def choices(self) -> list[_Choice]:
        if not self.kept:
            limit = self.fit.costs.units.memory(self.fit.memory_limit)
            raise SearchError(
                f"no schedule was found with {self.fit.allowed} within the memory limit of {limit} per rank: "
                "give more memory, a faster host link, or more ranks"
            )
        self.families = self.families or {each.found_by: each.value for each in self.kept}
        return [
            _Choice(each.value, each.found_by, each.timeline.schedule.renamed("searched")) for each in self.kept
        ]
