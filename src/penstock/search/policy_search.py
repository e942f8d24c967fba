"""Search with memory policies: the order, and which microbatches of which stages are recomputed or offloaded.

    orders      families, the serial order, the best orders within the limit, without a limit, and those with
                every microbatch recomputed
    policies    `FitMemory` on each of them: simple policies, then all policies, for the best orders first
    moves       from the best that fit: memory actions of single microbatches more or less, actions shifted;
                every one is simulated

So the result is never slower than a family with a uniform policy that `FitMemory` tries, and than the best
order that fits without memory actions. The serial order with everything recomputed and offloaded as late as
possible holds the least, so where copies take no time, something is found whenever anything fits.

The bound holds for every policy: required is only the work of the plain schedule, and every activation counts
with the least that a policy leaves of it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from time import perf_counter

import numpy as np

from penstock.bounds import Bound, Workload, bounds, least_needed
from penstock.cost.costs import Costs
from penstock.cost.effects import held_bytes
from penstock.cost.memory import exceeds
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
    code_of,
)
from penstock.ir.kinds import MEMORY_KINDS, Kind
from penstock.ir.schedule import Schedule
from penstock.search import exact
from penstock.search.driver import run
from penstock.search.passes import FitMemory, without_memory_actions
from penstock.search.problem import Problem
from penstock.search.request import Budget, Jitter, OnProgress, Progress, SearchResult, gap_of
from penstock.search.seeds import family_builders, serial
from penstock.simulation.simulator import Simulator, simulate
from penstock.simulation.timeline import Timeline
from penstock.validation import validate

# Orders that memory policies are for: families, the serial order, and problems for the compiled kernel.


def relaxed_workload(problem: Problem, fit: FitMemory) -> Workload:
    """The work of which every memory policy is one case, for lower bounds."""
    return replace(problem.work, may_recompute=fit.recompute, may_offload=fit.offload)


def require_feasible(problems: Sequence[Problem], fit: FitMemory) -> None:
    """Raise if no placement has a schedule that fits, whatever is recomputed or offloaded."""
    works = (relaxed_workload(problem, fit) for problem in problems)
    needs = [max((need, -rank) for rank, need in enumerate(least_needed(work))) for work in works]
    if all(exceeds(need, fit.memory_limit) for need, _ in needs):
        (need, rank), units = min(needs), fit.costs.units
        raise SearchError(
            f"no schedule fits the memory limit of {units.memory(fit.memory_limit)} per rank: rank {-rank} "
            f"needs {units.memory(need)} "
            "for parameters, gradients, optimizer state and one backward, whatever is recomputed or offloaded"
        )


def serial_order(problem: Problem) -> Schedule:
    """One microbatch after the other, which holds the least."""
    return problem.fused_schedule(serial(problem).order, "serial order")


def plain_order(problem: Problem, schedule: Schedule) -> Schedule:
    """The order of a family; if it offloads, without its copies."""
    if not schedule.table.has(Kind.OFFLOAD):
        return _same_work(problem, schedule)
    return _same_work(problem, without_memory_actions(schedule)).renamed(f"order of {schedule.name}")


def name_with_policy(schedule: Schedule) -> str:
    """The name of an order, and how often it has each memory action."""
    counts = {kind: int(schedule.table.of_kind(kind).sum()) for kind in MEMORY_KINDS[:2]}
    texts = [f"{count} {kind.value}" for kind, count in counts.items() if count]
    return f"{schedule.name} with {' and '.join(texts)}" if texts else schedule.name


def problems_to_order(problems: Sequence[Problem], *, recompute: bool) -> dict[str, list[Problem]]:
    """Problems without memory actions: within the limit, without a limit, and with everything recomputed."""
    again = [made for each in problems if (made := _recomputed(each)) and _can_fit(made)]
    return {
        "within the limit": [each for each in problems if _can_fit(each)],
        "without a limit": [replace(each, memory_limit=None) for each in problems],
        "with all recomputed": again if recompute else [],
    }


def _same_work(problem: Problem, schedule: Schedule) -> Schedule:
    """The schedule; fused backwards if they may not be split, and no pairs that save only a launch."""
    if problem.split and (problem.can_pair or not schedule.table.has_pairs):
        return schedule
    return problem.fused_schedule(problem.order_of(schedule), schedule.name)


def _can_fit(problem: Problem) -> bool:
    """Whether the serial order fits."""
    return problem.fits(serial(problem).order)


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
        toggles = [self._recompute] * recompute + [self._offload] * offload
        self._moves = [*toggles, self._shift]

    def changed(self, schedule: Schedule) -> Schedule | None:
        """The schedule after one move; None if the move is not possible."""
        rows = [row.tolist() for row in schedule.table.rows]
        rank = self._rng.randrange(len(rows))
        changed = self._rng.choice(self._moves)(rows[rank], rank)
        if changed is None:
            return None
        rows[rank] = changed
        return schedule.with_rows(rows)

    def _pair(self, rank: int) -> tuple[int, int]:
        stages = self._placement.stages_of_rank[rank]
        return self._rng.choice(stages), self._rng.randrange(self._microbatches)

    def _recompute(self, row: list[int], rank: int) -> list[int] | None:
        stage, microbatch = self._pair(rank)
        again = code_of(Kind.RECOMPUTE, stage, microbatch)
        if again in row:
            return [code for code in row if code != again]
        use = _step(row, _backward(row, stage, microbatch))
        return [*row[:use], again, *row[use:]]

    def _offload(self, row: list[int], rank: int) -> list[int] | None:
        stage, microbatch = self._pair(rank)
        both = [code_of(kind, stage, microbatch) for kind in (Kind.OFFLOAD, Kind.RELOAD)]
        if both[0] in row:
            return [code for code in row if code not in both]
        again = code_of(Kind.RECOMPUTE, stage, microbatch)
        use = row.index(again) if again in row else _step(row, _backward(row, stage, microbatch))
        after = _end(row, _index(row, Kind.F, stage, microbatch))
        before = _step(row, max(after, use - self._rng.randrange(_FARTHEST)))
        return [*row[:after], both[0], *row[after:before], both[1], *row[before:]]

    def _shift(self, row: list[int], rank: int) -> list[int] | None:
        """Move one action, with its pair, past up to some neighbours."""
        del rank
        first = _step(row, self._rng.randrange(len(row)))
        end = _end(row, first)
        moved, places = row[first:end], self._rng.randrange(1, _FARTHEST)
        if self._rng.random() < 0.5:
            start = _step(row, max(first - places, 0))
            passed, changed = row[start:first], [*row[:start], *moved, *row[start:first], *row[end:]]
        else:
            stop = _end(row, min(end + places, len(row)) - 1)
            passed, changed = row[end:stop], [*row[:first], *row[end:stop], *moved, *row[stop:]]
        return None if not passed or any(_are_ordered(a, b) for a in moved for b in passed) else changed


def _are_ordered(one: int, two: int) -> bool:
    """Whether the order of two actions of a rank has to stay: same stage, and same microbatch or same kind."""
    same_stage = one >> STAGE_SHIFT & STAGE_MASK == two >> STAGE_SHIFT & STAGE_MASK
    same_microbatch = one >> MICROBATCH_SHIFT & MICROBATCH_MASK == two >> MICROBATCH_SHIFT & MICROBATCH_MASK
    return same_stage and (same_microbatch or one >> KIND_SHIFT & KIND_MASK == two >> KIND_SHIFT & KIND_MASK)


def _index(row: Sequence[int], kind: Kind, stage: int, microbatch: int) -> int:
    """Where an action is, also as the second part of a pair."""
    code = code_of(kind, stage, microbatch)
    return next(i for i, each in enumerate(row) if each & ~JOINED == code)


def _backward(row: Sequence[int], stage: int, microbatch: int) -> int:
    codes = [code_of(kind, stage, microbatch) for kind in (Kind.I, Kind.B)]
    return next(i for i, each in enumerate(row) if each & ~JOINED in codes)


def _step(row: Sequence[int], place: int) -> int:
    """The first part of the step at this place."""
    return place - 1 if place < len(row) and row[place] & JOINED else place


def _end(row: Sequence[int], place: int) -> int:
    """Behind the step at this place."""
    return place + 2 if place + 1 < len(row) and row[place + 1] & JOINED else place + 1


def timeline_of(schedule: Schedule, costs: Costs, objective: str) -> Timeline | None:
    """The timeline of an order that can deadlock; None if it does."""
    try:
        simulator = Simulator(schedule, costs)
    except ScheduleError:  # no messages can be added to what deadlocks
        return None
    done = simulator.run()
    if np.min(done.end, initial=0) < 0:
        return None
    period = simulator.period(done) if objective == "period" else None
    return Timeline(schedule, costs, *simulator.times(done), period=period)


_KERNEL_MOVES = 200
"""Moves of the compiled kernel that a simulated move counts as."""
_KEPT = 6
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


@dataclass(eq=False)
class PolicySearch:
    """One search: its problems, which have a memory limit, and what was found."""

    problems: Sequence[Problem]
    fit: FitMemory
    budget: Budget
    jitter: Jitter | None
    on_progress: OnProgress
    started: float = field(default_factory=perf_counter)
    kept: list[_Fitted] = field(default_factory=list)
    families: dict[str, float] = field(default_factory=dict)
    too_large: dict[str, float] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    """Orders for which there was no time."""
    runs: int = 0
    moves_made: int = 0
    interrupted: bool = False

    def run(self) -> SearchResult:
        """All layers, and the best."""
        try:
            self._fit_all(self._simply_fitted())
            self._move()
        except KeyboardInterrupt:
            if not self.kept:
                raise
            self.interrupted = True
        if not self.kept:
            raise self._does_not_fit()
        return self._result()

    # --- budget ------------------------------------------------------------------------------------

    @property
    def fraction(self) -> float:
        """Of the budget that is used."""
        return self.budget.fraction(perf_counter() - self.started, self.moves_made)

    @cached_property
    def bound(self) -> Bound:
        """For every order and every memory policy."""
        fit = self.fit
        works = (relaxed_workload(problem, fit) for problem in self.problems)
        return min(bounds(work, fit.memory_limit, fit.objective)[0] for work in works)

    def _report(self, phase: str) -> None:
        best = self.kept[0].value if self.kept else math.inf
        self.on_progress(
            Progress(phase, best, self.bound.seconds, perf_counter() - self.started, self.fraction)
        )

    # --- orders ------------------------------------------------------------------------------------

    def _orders(self) -> Iterator[Schedule]:
        """Families, the serial order, and orders that the kernel finds, which knows no memory actions."""
        for problem in self.problems:
            yield serial_order(problem)
            for name, builder in family_builders(problem, offloading=True).items():
                if self._has_no_time_left():
                    self.skipped.append(name)
                elif (schedule := builder()) is not None:
                    if schedule.table.has(Kind.OFFLOAD) and self.fit.offload and problem.split:
                        self._try_as_it_is(schedule)
                    yield plain_order(problem, schedule)
        for what, problems in problems_to_order(self.problems, recompute=self.fit.recompute).items():
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
        return bool(self.kept) and not gap_of(self.kept[0].value, self.bound.seconds)

    # --- policies ----------------------------------------------------------------------------------

    def _simply_fitted(self) -> dict[Schedule, float]:
        """The simplest policies for every order; return the best value of each order."""
        values: dict[Schedule, float] = {}
        for schedule in self._orders():
            if schedule not in values and not self._has_no_time_left():
                timeline = self.fit.fitted_simply(schedule, self._has_no_time_left)
                values[schedule] = math.inf if timeline is None else self._value(timeline)
                if timeline is not None:
                    self._keep(timeline, name_with_policy(timeline.schedule))
        return values

    def _fit_all(self, values: dict[Schedule, float]) -> None:
        """All policies, for the best orders first."""
        for schedule in sorted(values, key=lambda each: values[each]):
            if self._is_done:
                break
            if self._has_no_time_left():
                self.skipped.append(schedule.name)
            else:
                self._fit(schedule)
                self._report("policies")

    def _fit(self, schedule: Schedule) -> None:
        """All policies for an order."""
        try:
            timeline = self.fit.fitted(schedule, self._is_late)
        except SearchError:
            self.too_large[schedule.name] = max(simulate(schedule, self.fit.costs).peak_memory)
            return
        self.runs += 1
        self._keep(timeline, name_with_policy(timeline.schedule))
        self.families.setdefault(name_with_policy(timeline.schedule), self._value(timeline))

    def _has_no_time_left(self) -> bool:
        """Whether it is late, and something fits."""
        return bool(self.kept) and self._is_late()

    def _is_late(self) -> bool:
        """Whether the time for policies is used; never with a budget of moves."""
        return self.budget.moves is None and self.fraction >= _SHARE_OF_POLICIES

    def _move(self) -> None:
        """Anneal from the best orders until the budget is used or the best is optimal."""
        rng = random.Random(self.budget.seed)  # noqa: S311 -- no secret
        while self.fraction < 1 and not self._is_done and self.kept:
            start = self.kept[0] if rng.random() < 0.5 else rng.choice(self.kept)
            self._anneal(start, rng)
            self._report("moves")

    def _anneal(self, start: _Fitted, rng: random.Random, moves: int = 200) -> None:
        fit, now = self.fit, start
        made = PolicyMoves(start.timeline.schedule, rng, recompute=fit.recompute, offload=fit.offload)
        temperature = rng.choice((0.0, 0.003, 0.01)) * start.value
        for _ in range(moves):
            self.moves_made += _KERNEL_MOVES
            if self.fraction >= 1:
                return
            changed = made.changed(now.timeline.schedule)
            self.runs += changed is not None
            timeline = None if changed is None else timeline_of(changed, fit.costs, fit.objective)
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
            self.kept = sorted([*self.kept, found], key=lambda each: each.score)[:_KEPT]

    def _fitted(self, timeline: Timeline, found_by: str) -> _Fitted:
        return _Fitted(timeline, self._value(timeline), self.fit.score(timeline), found_by)

    def _value(self, timeline: Timeline) -> float:
        return timeline.length(self.fit.objective)

    # --- result ------------------------------------------------------------------------------------

    def _result(self) -> SearchResult:
        best, quantile = self.kept[0], None
        if self.jitter is not None:
            schedules = [each.timeline.schedule for each in self.kept]
            position, quantile = self.jitter.best(
                schedules,
                self.fit.costs,
                self.budget.seed,
                lambda: self.budget.is_over(perf_counter() - self.started),
            )
            best = self.kept[position]
        schedule = best.timeline.schedule.renamed("searched")
        return SearchResult(
            schedule=schedule,
            timeline=simulate(schedule, self.fit.costs, with_period=True),
            objective=self.fit.objective,
            value=best.value,
            bound=self.bound,
            found_by=best.found_by,
            families=self.families or {each.found_by: each.value for each in self.kept},
            too_large=self.too_large,
            skipped=tuple(dict.fromkeys(self.skipped)),
            runs=self.runs,
            seconds=perf_counter() - self.started,
            interrupted=self.interrupted,
            missing=() if exact.available() else ("exact solver (ortools)",),
            quantile=quantile,
        )

    def _does_not_fit(self) -> SearchError:
        limit = self.fit.costs.units.memory(self.fit.memory_limit)
        return SearchError(
            f"no schedule was found with {self.fit.allowed} within the memory limit of {limit} per rank: "
            "give more memory, a faster host link, or more ranks"
        )


def run_with_policies(
    problems: Sequence[Problem],
    fit: FitMemory,
    budget: Budget,
    jitter: Jitter | None,
    on_progress: OnProgress,
) -> SearchResult:
    """Search all problems; raise if even the least that a policy leaves exceeds the limit on a rank."""
    require_feasible(problems, fit)
    return PolicySearch(problems, fit, budget, jitter, on_progress).run()
