"""Exact solver: CP-SAT finds the best order in a model of all orders (`exact_model`), or proves a bound.

A period is never less than a rank's span plus the optimizer step. The best span in the model of all orders can
be one that no order has, or only one with microbatches out of order, which a search has none of. The best order
with microbatches in order then comes from a second model, which proves nothing.
"""

# ruff: noqa: ANN401 -- ortools has no types

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from threading import Event, Thread
from typing import Any

import numpy as np

from penstock.ir.encoding import Ints
from penstock.search.exact_model import Key, Steps, Unit, build, unit_of
from penstock.search.kernel_arrays import PAIRED, SEPARATE, WEIGHT_GRAD
from penstock.search.numbering import number_entries
from penstock.search.problem import Problem


@dataclass(frozen=True)
class ExactResult:
    """An order, if the solver found one, and a lower bound on the objective."""

    order: Ints | None
    bound: float


@dataclass(frozen=True)
class Effort:
    """Budget of the solver: seconds of wall time, or of deterministic time if `deterministic`."""

    seconds: float
    deterministic: bool
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
    """Find an order better than `start`, or raise the lower bound from `bound`; `stop` ends it early.

    The bound holds for all orders, also for those that run microbatches in any order.
    """
    unit = unit_of(problem)
    if problem.objective != "span" or not unit.is_exact or problem.microbatches == 1:
        return _solve(problem, start, bound, effort, stop, unit, ascending=False)
    half = replace(effort, seconds=effort.seconds / 2)
    found = _solve(problem, start, bound, half, stop, unit, ascending=False)
    best = start
    if found.order is not None and problem.fits(found.order):
        best = min(start, found.order, key=problem.value)
    if stop.is_set() or problem.value(best) <= found.bound * (1 + 1e-9):
        return ExactResult(best, found.bound)
    other = _solve(problem, best, found.bound, half, stop, unit, ascending=True)
    return ExactResult(best if other.order is None else other.order, found.bound)


def _solve(
    problem: Problem, start: Ints, bound: float, effort: Effort, stop: Event, unit: Unit, *, ascending: bool
) -> ExactResult:
    """Solve one model."""
    from ortools.sat.python import cp_model  # noqa: PLC0415 -- an extra

    horizon = math.ceil(problem.value(start) / unit.seconds) + 1
    if problem.objective != "makespan":
        # ranks with neighbouring stages are at work at the same time; in a chain, the rank of the first stage
        # starts first, and every other rank starts before that one ends
        horizon *= 2 if problem.stage_graph.is_chain else max(problem.placement.num_ranks, 2)
    model = cp_model.CpModel()
    optimizer_step = problem.arrays.optimizer_step if problem.objective == "period" else 0.0
    least = unit.of(bound - optimizer_step)
    steps, span = build(problem, model, unit, horizon, least, ascending=ascending)
    model.minimize(span)
    _add_hints(problem, model, steps, start, unit)
    solver = _solver(cp_model, effort)
    status = _solve_until(stop, solver, model)
    # a start that is rounded down makes a span longer, by less than one unit
    rounding = 0 if unit.is_exact or problem.objective == "makespan" else 1
    bound = max(bound, (solver.best_objective_bound - rounding) * unit.seconds + optimizer_step)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return ExactResult(None, bound)
    return ExactResult(_order(problem, solver, steps), bound)


def _solver(cp_model: Any, effort: Effort) -> Any:
    solver = cp_model.CpSolver()
    solver.parameters.random_seed = effort.seed
    solver.parameters.catch_sigint_signal = False
    solver.parameters.num_workers = effort.workers
    if effort.deterministic:
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


def _add_hints(problem: Problem, model: Any, steps: Steps, order: Ints, unit: Unit) -> None:
    """Start from an order: when its steps start, which backwards are joined, and which pairs there are."""
    times = problem.start_times(order)
    together: set[Key] = set()
    pairs: dict[Key, Key] = {}
    previous: Key = (-1, -1)
    entries = number_entries(problem.arrays, order)
    for token, number, is_joined, begin in zip(*(each.tolist() for each in (*entries, times))):
        key = token, number
        model.add_hint(steps.starts[key], unit.of(begin))
        if is_joined and token % 3 == WEIGHT_GRAD:
            together |= {key, (token - 1, number)}
        elif is_joined:
            pairs[key] = previous
        previous = key
    for key, var in steps.joined.items():
        if key[0] % 3 == WEIGHT_GRAD:
            model.add_hint(var, key in together)
    for (forward, back, kind), var in steps.pairs.items():
        model.add_hint(var, pairs.get(back) == forward and (back in together) == bool(kind))


def _order(problem: Problem, solver: Any, steps: Steps) -> Ints:
    """The order of a solution; of steps that start together, those of zero length come first."""
    by_rank: list[list[tuple[int, bool, int, int]]] = [[] for _ in problem.placement.stages_of_rank]
    joined = {key for key, var in steps.joined.items() if solver.value(var)}
    forward_of = {back: forward for (forward, back, _), var in steps.pairs.items() if solver.value(var)}
    inside = {*forward_of.values(), *(key for key in joined if key[0] % 3 == WEIGHT_GRAD)}
    for (token, number), start in steps.starts.items():
        if (token, number) not in inside:
            begin, end = solver.value(start), solver.value(steps.ends[token, number])
            rank = problem.arrays.rank_of_stage[token // 3]
            by_rank[rank].append((begin, end > begin, number, token))
    order: list[int] = []
    for *_, number, token in (step for own in by_rank for step in sorted(own)):
        if (token, number) in forward_of:
            order += [forward_of[token, number][0], token | PAIRED]
        else:
            is_separate = token % 3 == WEIGHT_GRAD and (token, number) in steps.joined
            order.append(token | SEPARATE if is_separate else token)
        if (token, number) in joined:
            order.append(token + 1)
    return np.array(order, dtype=np.int64)
