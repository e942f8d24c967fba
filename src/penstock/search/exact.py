"""Exact solver: a constraint model of all orders, solved by CP-SAT, which finds the best one or proves a bound.

Every step is an interval in integer units of time. The steps of a rank do not overlap, inputs come first,
microbatches of a kind and stage run in ascending order, and the activations that F allocates and I and W
release stay within the memory limit. Where B is shorter than I and W, each backward may be joined: I then takes
as long as B, and W follows at once and takes no time. Seconds are rounded down to units, and bytes so that more
orders fit, so a bound of the model is a bound for every real order. A period is never less than a rank's span
plus the optimizer step.
"""

# ruff: noqa: ANN401 -- ortools has no types

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from threading import Event, Thread
from typing import Any

import numpy as np

from penstock.ir.table import Floats, Ints
from penstock.search.kernel_arrays import FORWARD, INPUT_GRAD, SEPARATE, WEIGHT_GRAD
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

    unit = _unit(problem)
    horizon = math.ceil(problem.value(start) / unit) + 1
    if problem.objective != "makespan":  # every rank starts before the first one ends, and ends a span later
        horizon *= 2
    model = cp_model.CpModel()
    steps = _steps(problem, model, unit, horizon)
    _precedence(problem, model, steps, unit)
    _memory(problem, model, steps)
    optimizer_step = problem.arrays.optimizer_step if problem.objective == "period" else 0.0
    least = math.floor((bound - optimizer_step) / unit + 1e-9)
    span = model.new_int_var(least, horizon, "objective")
    _objective(problem, model, steps, span)
    model.minimize(span)
    _add_hints(problem, model, steps, start, unit)
    solver = _solver(cp_model, effort)
    status = _solve_until(stop, solver, model)
    bound = max(bound, solver.best_objective_bound * unit + optimizer_step)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return ExactResult(None, bound)
    return ExactResult(_order(problem, solver, steps), bound)


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


@dataclass(frozen=True)
class _Steps:
    """The variables of the model."""

    starts: dict[Key, Any]
    ends: dict[Key, Any]
    joined: dict[Key, Any]
    """Whether I and W are one B, by their two keys, for stages where that is shorter."""


def _unit(problem: Problem) -> float:
    """Seconds per unit of the model's time."""
    arrays = problem.arrays
    used = [each for token, each in enumerate(arrays.seconds.tolist()) if token % 3 < arrays.kinds]
    fused = [each for each in arrays.fused_seconds.tolist() if each >= 0]
    amounts = [each for each in (*used, *fused, *arrays.messages.lag.tolist()) if each]
    whole = [round(each) for each in amounts]
    if all(abs(each - near) < 1e-9 * each for each, near in zip(amounts, whole)) and whole:
        return float(math.gcd(*whole))
    return sum(used) * problem.microbatches / _UNITS or 1.0


def _steps(problem: Problem, model: Any, unit: float, horizon: int) -> _Steps:
    """The start and the end of each step; no overlap on a rank, microbatches in ascending order."""
    arrays = problem.arrays
    lengths, fused = _units(arrays.seconds, unit), _units(arrays.fused_seconds, unit)
    steps = _Steps({}, {}, {})
    intervals: list[list[Any]] = [[] for _ in problem.placement.stages_of_rank]
    for token in (token for token in range(len(lengths)) if token % 3 < arrays.kinds):
        stage, kind = divmod(token, 3)
        for i in range(problem.microbatches):
            key = token, i
            size = lengths[token]
            if fused[stage] >= 0 and kind != FORWARD:
                if kind == INPUT_GRAD:
                    steps.joined[key] = steps.joined[token + 1, i] = model.new_bool_var("")
                size += steps.joined[key] * ((fused[stage] if kind == INPUT_GRAD else 0) - lengths[token])
            steps.starts[key] = start = model.new_int_var(0, horizon, "")
            if key in steps.joined:
                steps.ends[key] = end = model.new_int_var(0, 2 * horizon, "")
            else:
                steps.ends[key] = end = start + size
            intervals[arrays.rank_of_stage[stage]].append(model.new_interval_var(start, size, end, ""))
            if i:
                _ascend(model, steps, (token, i - 1), key)
    for own in intervals:
        model.add_no_overlap(own)
    return steps


def _units(seconds: Floats, unit: float) -> list[int]:
    """Rounded down."""
    return [math.floor(each / unit + 1e-9) for each in seconds.tolist()]


def _ascend(model: Any, steps: _Steps, first: Key, then: Key) -> None:
    """Two microbatches of a kind and stage: a W that is joined with its I does not wait for an earlier one."""
    ordered = model.add(steps.starts[then] >= steps.ends[first])
    if then[0] % 3 == WEIGHT_GRAD and then in steps.joined:
        ordered.only_enforce_if(~steps.joined[then], ~steps.joined[first])


def _precedence(problem: Problem, model: Any, steps: _Steps, unit: float) -> None:
    """Every step starts after the arrival of its inputs."""
    messages = problem.arrays.messages
    starts, ends, lags = steps.starts, steps.ends, _units(messages.lag, unit)
    consumer = np.repeat(np.arange(len(messages.input_bounds) - 1), np.diff(messages.input_bounds)).tolist()
    for i in range(problem.microbatches):
        for token in range(0, 3 * problem.placement.num_stages, 3):
            model.add(starts[token + INPUT_GRAD, i] >= ends[token, i])
            if problem.split:
                model.add(starts[token + WEIGHT_GRAD, i] >= ends[token + INPUT_GRAD, i])
            if (joined := steps.joined.get((token + INPUT_GRAD, i))) is not None:
                model.add(starts[token + WEIGHT_GRAD, i] == ends[token + INPUT_GRAD, i]).only_enforce_if(joined)
        for token, message in zip(consumer, messages.inputs.tolist()):
            model.add(starts[token, i] >= ends[int(messages.producer[message]), i] + lags[message])


def _memory(problem: Problem, model: Any, steps: _Steps) -> None:
    """Keep each rank within its limit: what F allocates is rounded down, what I releases is rounded up."""
    starts, ends = steps.starts, steps.ends
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


def _objective(problem: Problem, model: Any, steps: _Steps, span: Any) -> None:
    """The last end, or the longest time between a rank's first start and its last end."""
    last = problem.microbatches - 1
    for (token, i), end in steps.ends.items():
        if token % 3 == FORWARD or (i < last and (token, i) not in steps.joined):
            continue
        if problem.objective == "makespan":
            model.add(span >= end)
            continue
        rank = problem.arrays.rank_of_stage[token // 3]
        for other in problem.placement.stages_of_rank[rank]:
            model.add(span >= end - steps.starts[3 * other, 0])


def _add_hints(problem: Problem, model: Any, steps: _Steps, order: Ints, unit: float) -> None:
    """Start from an order: when its steps start, and which backwards are joined."""
    times = problem.start_times(order)
    for first, last in pairwise(problem.arrays.rank_bounds.tolist()):
        numbered = problem.numbered(order[first:last])
        for (token, number, is_joined), begin in zip(numbered, times[first:last].tolist()):
            model.add_hint(steps.starts[token, number], math.floor(begin / unit))
            if (token, number) in steps.joined and token % 3 == WEIGHT_GRAD:
                model.add_hint(steps.joined[token, number], is_joined)


def _order(problem: Problem, solver: Any, steps: _Steps) -> Ints:
    """The order of a solution; of steps that start together, those of zero length come first."""
    by_rank: list[list[tuple[int, bool, int, int]]] = [[] for _ in problem.placement.stages_of_rank]
    joined = {key for key, var in steps.joined.items() if solver.value(var)}
    for (token, number), start in steps.starts.items():
        if token % 3 != WEIGHT_GRAD or (token, number) not in joined:
            begin, end = solver.value(start), solver.value(steps.ends[token, number])
            rank = problem.arrays.rank_of_stage[token // 3]
            by_rank[rank].append((begin, end > begin, number, token))
    order: list[int] = []
    for *_, number, token in (step for own in by_rank for step in sorted(own)):
        is_separate = token % 3 == WEIGHT_GRAD and (token, number) in steps.joined
        order.append(token | SEPARATE if is_separate else token)
        if (token, number) in joined:
            order.append(token + 1)
    return np.array(order, dtype=np.int64)
