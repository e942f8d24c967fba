"""Exact solver: a constraint model of all orders, solved by CP-SAT, which finds the best one or proves a bound.

Every step is an interval in integer units of time. The steps of a rank do not overlap, inputs come first,
microbatches of a kind and stage run in ascending order, and the activations that F allocates and I and W
release stay within the memory limit. Seconds are rounded down to units, and bytes so that more orders fit, so a
bound of the model is a bound for every real order. A period is never less than a rank's span plus the optimizer
step.
"""

# ruff: noqa: ANN401 -- ortools has no types

from __future__ import annotations

import math
from dataclasses import dataclass
from threading import Event, Thread
from typing import Any

import numpy as np

from penstock.ir.table import Ints
from penstock.search.kernel_arrays import FORWARD, INPUT_GRAD, WEIGHT_GRAD
from penstock.search.problem import Problem

__all__ = ["Effort", "ExactResult", "available", "solve"]

_UNITS = 1_000_000
"""Units of time in the total work of all ranks, where seconds have no common divisor."""


@dataclass(frozen=True)
class ExactResult:
    """An order, if the solver found one, and a lower bound on the objective."""

    order: Ints | None
    bound: float


@dataclass(frozen=True)
class Effort:
    """Budget of the solver: seconds of wall time, or of deterministic time if `counted`."""

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


def solve(problem: Problem, start: Ints, bound: float, effort: Effort, stop: Event) -> ExactResult:
    """Find an order better than `start`, or raise the lower bound from `bound`; `stop` ends it early."""
    from ortools.sat.python import cp_model  # noqa: PLC0415 -- an extra

    model = cp_model.CpModel()
    unit = _unit(problem)
    lengths = [math.floor(each / unit + 1e-9) for each in problem.arrays.seconds.tolist()]
    lags = [math.floor(each / unit + 1e-9) for each in problem.arrays.lag.tolist()]
    value = problem.value(start)
    horizon = math.ceil(value / unit) + 1
    if problem.objective != "makespan":  # every rank starts before the first one ends, and ends a span later
        horizon *= 2
    starts, ends = _steps(problem, model, lengths, horizon)
    _precedence(problem, model, starts, ends, lags)
    _memory(problem, model, starts, ends)
    optimizer_step = problem.arrays.optimizer_step if problem.objective == "period" else 0.0
    least = math.floor((bound - optimizer_step) / unit + 1e-9)
    span = model.new_int_var(least, horizon, "objective")
    _objective(problem, model, starts, ends, span)
    model.minimize(span)
    times = _times(problem, start)
    for key, var in starts.items():
        model.add_hint(var, math.floor(times[key] / unit))
    solver = _solver(cp_model, effort)
    status = _solve_until(stop, solver, model)
    bound = max(bound, solver.best_objective_bound * unit + optimizer_step)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return ExactResult(None, bound)
    found = _order(problem, {key: solver.value(var) for key, var in starts.items()}, lengths)
    return ExactResult(found, bound)


def _solver(cp_model: Any, effort: Effort) -> Any:
    solver = cp_model.CpSolver()
    solver.parameters.random_seed = effort.seed
    solver.parameters.catch_sigint_signal = False
    solver.parameters.num_workers = effort.workers
    if effort.counted:
        solver.parameters.max_deterministic_time = effort.seconds
    else:
        solver.parameters.max_time_in_seconds = effort.seconds
    return solver


def _solve_until(stop: Event, solver: Any, model: Any) -> Any:
    """Solve in another thread, so that Ctrl-C reaches this one."""
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
    """Seconds per unit of the model's time."""
    arrays = problem.arrays
    used = [each for token, each in enumerate(arrays.seconds.tolist()) if token % 3 < arrays.kinds]
    amounts = [each for each in (*used, *arrays.lag.tolist()) if each]
    whole = [round(each) for each in amounts]
    if all(abs(each - near) < 1e-9 * each for each, near in zip(amounts, whole)) and whole:
        return float(math.gcd(*whole))
    return sum(used) * problem.microbatches / _UNITS or 1.0


def _steps(
    problem: Problem, model: Any, lengths: list[int], horizon: int
) -> tuple[dict[Key, Any], dict[Key, Any]]:
    """The start and the end of each step; no overlap on a rank, microbatches in ascending order."""
    starts: dict[Key, Any] = {}
    ends: dict[Key, Any] = {}
    by_rank: dict[int, list[Any]] = {}
    for stage in range(problem.placement.num_stages):
        intervals = by_rank.setdefault(int(problem.arrays.rank_of_stage[stage]), [])
        for kind in range(problem.arrays.kinds):
            token = 3 * stage + kind
            for i in range(problem.microbatches):
                start = model.new_int_var(0, horizon, "")
                starts[token, i], ends[token, i] = start, start + lengths[token]
                intervals.append(model.new_fixed_size_interval_var(start, lengths[token], ""))
                if i:
                    model.add(start >= ends[token, i - 1])
    for intervals in by_rank.values():
        model.add_no_overlap(intervals)
    return starts, ends


def _precedence(
    problem: Problem, model: Any, starts: dict[Key, Any], ends: dict[Key, Any], lags: list[int]
) -> None:
    """Every step starts after the arrival of its inputs."""
    stages = problem.placement.num_stages
    for i in range(problem.microbatches):
        for stage in range(stages):
            token = 3 * stage
            model.add(starts[token + INPUT_GRAD, i] >= ends[token, i])
            if problem.split:
                model.add(starts[token + WEIGHT_GRAD, i] >= ends[token + INPUT_GRAD, i])
        for token, needed in enumerate(problem.arrays.inputs.tolist()):
            if needed >= 0:
                model.add(starts[token, i] >= ends[needed, i] + lags[needed])


def _memory(problem: Problem, model: Any, starts: dict[Key, Any], ends: dict[Key, Any]) -> None:
    """Keep each rank within its limit: what F allocates is rounded down, what I releases is rounded up."""
    held = problem.arrays.memory_change[FORWARD::3]
    by_input = -problem.arrays.memory_change[INPUT_GRAD::3]
    for rank, limit in enumerate(problem.arrays.memory_limits.tolist()):
        stages = [
            stage
            for stage in range(problem.placement.num_stages)
            if problem.arrays.rank_of_stage[stage] == rank
        ]
        if not math.isfinite(limit) or sum(held[stage] for stage in stages) * problem.microbatches <= limit:
            continue
        amounts = [float(each[stage]) for each in (held, by_input) for stage in stages if each[stage]]
        whole = all(each == round(each) for each in amounts)
        unit = float(math.gcd(*map(round, amounts))) if whole else max(amounts) / 10_000
        times: list[Any] = []
        changes: list[int] = []
        for stage in stages:
            token = 3 * stage
            allocated = math.floor(held[stage] / unit)
            released = min(math.ceil(by_input[stage] / unit), allocated)
            for i in range(problem.microbatches):
                times.append(starts[token, i])
                changes.append(allocated)
                if released:
                    times.append(ends[token + INPUT_GRAD, i])
                    changes.append(-released)
                if allocated - released:
                    times.append(ends[token + WEIGHT_GRAD, i])
                    changes.append(released - allocated)
        model.add_reservoir_constraint(times, changes, 0, math.floor(limit / unit + 1e-9))


def _objective(problem: Problem, model: Any, starts: dict[Key, Any], ends: dict[Key, Any], span: Any) -> None:
    """The last end, or the longest time between a rank's first start and its last end."""
    last = problem.microbatches - 1
    kinds = (INPUT_GRAD, WEIGHT_GRAD) if problem.split else (INPUT_GRAD,)
    for stage in range(problem.placement.num_stages):
        for kind in kinds:
            end = ends[3 * stage + kind, last]
            if problem.objective == "makespan":
                model.add(span >= end)
                continue
            for other in range(problem.placement.num_stages):
                if problem.arrays.rank_of_stage[other] == problem.arrays.rank_of_stage[stage]:
                    model.add(span >= end - starts[3 * other, 0])


def _times(problem: Problem, order: Ints) -> dict[Key, float]:
    """When each step of an order starts."""
    done: dict[int, int] = {}
    found = {}
    for token, begin in zip(order.tolist(), problem.start_times(order).tolist()):
        number = done.get(token, 0)
        done[token] = number + 1
        found[token, number] = begin
    return found


def _order(problem: Problem, times: dict[Key, int], lengths: list[int]) -> Ints:
    """The order of a solution; of steps that start together, those of zero length come first."""
    by_rank: dict[int, list[tuple[int, int, int, int]]] = {}
    for (token, number), begin in times.items():
        rank = int(problem.arrays.rank_of_stage[token // 3])
        by_rank.setdefault(rank, []).append((begin, int(lengths[token] > 0), number, token))
    order = [token for rank in sorted(by_rank) for *_, token in sorted(by_rank[rank])]
    return np.array(order, dtype=np.int64)
