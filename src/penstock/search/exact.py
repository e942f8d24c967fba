"""The exact layer: a constraint model of all orders at once, solved by CP-SAT, which proves what is best.

Every step is an interval in whole units of time. Steps of a rank do not overlap, inputs come first,
microbatches of one kind and stage go by number, and what F takes and I and W give back never adds up to more
than a rank may hold. Seconds are rounded down to units, and bytes in favour of what fits, so whatever is proved
of the model holds for every real order. A period is never less than a rank's span and the optimizer step.
"""

# ruff: noqa: ANN401 -- ortools has no types

from __future__ import annotations

import math
from dataclasses import dataclass
from threading import Event, Thread
from typing import Any

import numpy as np

from penstock.ir.table import Ints
from penstock.search import kernel
from penstock.search.problem import Problem

__all__ = ["Effort", "Exact", "available", "solve"]

_UNITS = 1_000_000
"""Of time in the work of all ranks together, where seconds are not whole numbers of something larger."""


@dataclass(frozen=True)
class Exact:
    """What the solver found: an order if there is one, and a bound below which none is."""

    order: Ints | None
    bound: float


@dataclass(frozen=True)
class Effort:
    """How hard to try: seconds of a clock, or of work that is counted and the same every time."""

    seconds: float
    counted: bool
    workers: int
    seed: int


def available() -> bool:
    """Whether the solver is installed."""
    try:
        import ortools  # noqa: F401, PLC0415 -- an extra
    except ImportError:
        return False
    return True


def solve(problem: Problem, start: Ints, known: float, effort: Effort, stop: Event) -> Exact:
    """Look for an order better than `start`, or prove that there is none; `known` is a bound that holds anyway.

    `stop` ends it early.
    """
    from ortools.sat.python import cp_model  # noqa: PLC0415 -- an extra

    model = cp_model.CpModel()
    unit = _unit(problem)
    lengths = [math.floor(each / unit + 1e-9) for each in problem.tables.seconds.tolist()]
    lags = [math.floor(each / unit + 1e-9) for each in problem.tables.lag.tolist()]
    value = problem.value(start)
    horizon = math.ceil(value / unit) + 1
    if problem.objective != "makespan":  # every rank begins before the first one ends, and ends a span later
        horizon *= 2
    starts, ends = _steps(problem, model, lengths, lags, horizon)
    _memory(problem, model, starts, ends)
    pause = problem.tables.pause if problem.objective == "period" else 0.0
    least = math.floor((known - pause) / unit + 1e-9)
    span = model.new_int_var(least, horizon, "objective")
    _objective(problem, model, starts, ends, span)
    model.minimize(span)
    times = _times(problem, start)
    for key, var in starts.items():
        model.add_hint(var, math.floor(times[key] / unit))
    solver = cp_model.CpSolver()
    solver.parameters.random_seed = effort.seed
    solver.parameters.catch_sigint_signal = False
    solver.parameters.num_workers = effort.workers
    if effort.counted:
        solver.parameters.max_deterministic_time = effort.seconds
    else:
        solver.parameters.max_time_in_seconds = effort.seconds
    status = _until(stop, solver, model)
    bound = max(known, solver.best_objective_bound * unit + pause)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Exact(None, bound)
    found = _order(problem, {key: solver.value(var) for key, var in starts.items()}, lengths)
    return Exact(found, bound)


def _until(stop: Event, solver: Any, model: Any) -> Any:
    """Solve in a thread of its own, so that a key press reaches the one that waits."""
    answers: list[Any] = []
    thread = Thread(target=lambda: answers.append(solver.solve(model)), daemon=True)
    thread.start()
    try:
        while thread.is_alive() and not stop.is_set():
            thread.join(0.05)
    finally:
        if thread.is_alive():
            solver.stop_search()
        thread.join()
    return answers[0]


Key = tuple[int, int]
"""A token and a microbatch."""


def _unit(problem: Problem) -> float:
    """Seconds that one unit of the model is."""
    tables = problem.tables
    used = [each for token, each in enumerate(tables.seconds.tolist()) if token % 3 < tables.kinds]
    amounts = [each for each in (*used, *tables.lag.tolist()) if each]
    whole = [round(each) for each in amounts]
    if all(abs(each - near) < 1e-9 * each for each, near in zip(amounts, whole)) and whole:
        return float(math.gcd(*whole))
    return sum(used) * problem.microbatches / _UNITS or 1.0


def _steps(
    problem: Problem,
    model: Any,
    lengths: list[int],
    lags: list[int],
    horizon: int,
) -> tuple[dict[Key, Any], dict[Key, Any]]:
    """When each step begins, and ends."""
    stages, m = problem.placement.num_stages, problem.microbatches
    kinds = 3 if problem.split else 2
    starts: dict[Key, Any] = {}
    ends: dict[Key, Any] = {}
    by_rank: dict[int, list[Any]] = {}
    for stage in range(stages):
        for kind in range(kinds):
            token = 3 * stage + kind
            for i in range(m):
                begin = model.new_int_var(0, horizon, "")
                starts[token, i], ends[token, i] = begin, begin + lengths[token]
                rank = int(problem.tables.hosts[stage])
                by_rank.setdefault(rank, []).append(
                    model.new_fixed_size_interval_var(begin, lengths[token], "")
                )
                if i:
                    model.add(begin >= ends[token, i - 1])
    for intervals in by_rank.values():
        model.add_no_overlap(intervals)
    for i in range(m):
        for stage in range(stages):
            token = 3 * stage
            model.add(starts[token + kernel.G, i] >= ends[token, i])
            if problem.split:
                model.add(starts[token + kernel.W, i] >= ends[token + kernel.G, i])
            if stage < stages - 1:
                above = token + 3 + kernel.G
                model.add(starts[token + 3, i] >= ends[token, i] + lags[token])
                model.add(starts[token + kernel.G, i] >= ends[above, i] + lags[above])
    return starts, ends


def _memory(problem: Problem, model: Any, starts: dict[Key, Any], ends: dict[Key, Any]) -> None:
    """What a rank holds: F takes what is rounded down, and I gives back what is rounded up."""
    held = problem.tables.held[kernel.F :: 3]
    by_input = -problem.tables.held[kernel.G :: 3]
    for rank, limit in enumerate(problem.tables.limits.tolist()):
        stages = [stage for stage in range(problem.placement.num_stages) if problem.tables.hosts[stage] == rank]
        if not math.isfinite(limit) or sum(held[stage] for stage in stages) * problem.microbatches <= limit:
            continue
        amounts = [float(each[stage]) for each in (held, by_input) for stage in stages if each[stage]]
        whole = all(each == round(each) for each in amounts)
        unit = float(math.gcd(*map(round, amounts))) if whole else max(amounts) / 10_000
        times: list[Any] = []
        changes: list[int] = []
        for stage in stages:
            token = 3 * stage
            taken = math.floor(held[stage] / unit)
            given = min(math.ceil(by_input[stage] / unit), taken)
            for i in range(problem.microbatches):
                times.append(starts[token, i])
                changes.append(taken)
                if given:
                    times.append(ends[token + kernel.G, i])
                    changes.append(-given)
                if taken - given:
                    times.append(ends[token + kernel.W, i])
                    changes.append(given - taken)
        model.add_reservoir_constraint(times, changes, 0, math.floor(limit / unit + 1e-9))


def _objective(problem: Problem, model: Any, starts: dict[Key, Any], ends: dict[Key, Any], span: Any) -> None:
    """The last end, or the longest time between a rank's first start and its last end."""
    last = problem.microbatches - 1
    kinds = (kernel.G, kernel.W) if problem.split else (kernel.G,)
    for stage in range(problem.placement.num_stages):
        for kind in kinds:
            end = ends[3 * stage + kind, last]
            if problem.objective == "makespan":
                model.add(span >= end)
                continue
            for other in range(problem.placement.num_stages):
                if problem.tables.hosts[other] == problem.tables.hosts[stage]:
                    model.add(span >= end - starts[3 * other, 0])


def _times(problem: Problem, order: Ints) -> dict[Key, float]:
    """When each step begins in an order."""
    done: dict[int, int] = {}
    found = {}
    for token, begin in zip(order.tolist(), problem.begins(order).tolist()):
        number = done.get(token, 0)
        done[token] = number + 1
        found[token, number] = begin
    return found


def _order(problem: Problem, times: dict[Key, int], lengths: list[int]) -> Ints:
    """The order of a solution; of steps that begin at once, one without a length comes first."""
    by_rank: dict[int, list[tuple[int, int, int, int]]] = {}
    for (token, number), begin in times.items():
        rank = int(problem.tables.hosts[token // 3])
        by_rank.setdefault(rank, []).append((begin, int(lengths[token] > 0), number, token))
    rows = [token for rank in sorted(by_rank) for *_, token in sorted(by_rank[rank])]
    return np.array(rows, dtype=np.int64)
