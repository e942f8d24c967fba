"""Exact solver: CP-SAT finds the best order in a model of all orders (below), or proves a bound.

A period is never less than a rank's span plus the optimizer step. The best span in the model of all orders can
be one that no order has, or only one with microbatches out of order, which a search has none of. The best order
with microbatches in order then comes from a second model, which proves nothing.
"""

# ruff: noqa: ANN401 -- ortools has no types

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import combinations, product
from threading import Thread
from typing import Any

import numpy as np

from penstock.ir.encoding import Ints
from penstock.search.kernel import FORWARD, INPUT_GRAD, PAIRED, SEPARATE, WEIGHT_GRAD
from penstock.search.problem import Problem, number_entries

# The constraint model of all orders that the exact solver solves: its variables and its constraints.
#
# Every step is an interval in integer units of time, and the steps of a rank do not overlap. Inputs come first.
# From the start of F to the end of I, or of W, an activation takes a part of its rank's memory.
#
# Microbatches of a kind and stage run in ascending order. That leaves out no times of steps: microbatches are
# alike, so each kind and stage can number its microbatches anew by their start. If each step came after its
# inputs, the first, second, ... of its kind still come after the first, second, ... of these. So makespan and
# memory stay the same. A span does not follow from times alone: no rank may delay its first step, but that
# step may wait for any microbatch, not only for the first to arrive. So there are two models for spans:
#
#     all orders  the first step of a rank starts when any microbatch arrives. Steps ahead of it on other ranks
#                 may be late in the model, so its optimum can be below every order: a bound only
#     ascending   it starts when the first microbatch arrives: for an order, no bound
#
#     B        where it is shorter than I and W, each backward may be joined: I then takes as long as B, and W
#              follows at once and takes no time
#     pairs    where they pay, each F may be in a pair with each I of its rank: it starts and ends with that I,
#              which takes as long as the pair, and W may be joined as in B
#     queues   messages that occupy a channel do so one after the other, in the order of their steps
#
# Seconds that have no common divisor are rounded down to units, and bytes so that more orders fit, so a bound
# of the model is a bound for every real order.


_DENOMINATORS = 1000
"""The greatest denominator of seconds that are fractions with a common divisor."""
_UNITS = 1_000_000
"""Units of time in the total work of all ranks, where seconds have no common divisor."""

Key = tuple[int, int]
"""A token and a microbatch."""


@dataclass(frozen=True)
class Unit:
    """Seconds per unit of the model's time, and whether all durations are multiples of it."""

    seconds: float
    is_exact: bool

    def of(self, seconds: float) -> int:
        """Rounded down."""
        return math.floor(seconds / self.seconds + 1e-9)


def unit_of(problem: Problem) -> Unit:
    """The greatest common divisor of all seconds where there is one."""
    arrays = problem.arrays
    used = [each for token, each in enumerate(arrays.seconds.tolist()) if token % 3 < arrays.kinds]
    others = (arrays.fused_seconds, arrays.messages.lag, arrays.messages.seconds, arrays.pair_seconds)
    amounts = [each for each in (*used, *(x for other in others for x in other.ravel().tolist())) if each > 0]
    near = [Fraction(each).limit_denominator(_DENOMINATORS) for each in amounts]
    scale = math.lcm(*(each.denominator for each in near))
    if near and scale <= _DENOMINATORS and all(abs(x - n) <= 1e-9 * x for x, n in zip(amounts, near)):
        return Unit(math.gcd(*(int(each * scale) for each in near)) / scale, is_exact=True)
    return Unit(sum(used) * problem.microbatches / _UNITS or 1.0, is_exact=False)


@dataclass(frozen=True)
class _Model:
    problem: Problem
    model: Any
    unit: Unit
    horizon: int
    ascending: bool
    """Whether a rank's first step is of the first microbatch that arrives: an optimum is then no bound."""
    starts: dict[Key, Any] = field(default_factory=dict)
    ends: dict[Key, Any] = field(default_factory=dict)
    joined: dict[Key, Any] = field(default_factory=dict)
    """Whether I and W are one B, by their two keys, where that can pay."""
    pairs: dict[tuple[Key, Key, int], Any] = field(default_factory=dict)
    """Whether an F and an I are a pair, with W in it (1) or without (0)."""

    def _length(self, token: int) -> int:
        return self.unit.of(self.problem.arrays.seconds[token])

    def _time(self) -> Any:
        return self.model.new_int_var(0, 2 * self.horizon, "")

    # --- steps -------------------------------------------------------------------------------------

    def add_steps(self) -> None:
        """The start and the end of each step; no overlap on a rank, microbatches in ascending order."""
        for own in self.problem.placement.stages_of_rank:
            forwards, backwards, weights = (
                [(3 * s + kind, i) for s in own for i in range(self.problem.microbatches)] for kind in range(3)
            )
            for key in (*forwards, *backwards, *(weights if self.problem.split else ())):
                self.starts[key] = self.model.new_int_var(0, self.horizon, "")
            for key in forwards:
                end = self.starts[key] + self._length(key[0])
                self.ends[key] = self._time() if self.problem.can_pair else end
            intervals = [self._backward(key, forwards) for key in backwards]
            intervals += map(self._forward, forwards)
            intervals += map(self._weight, weights if self.problem.split else ())
            self.model.add_no_overlap(intervals)
        for token, i in self.starts:
            if i:
                self._ascend((token, i - 1), (token, i))

    def _backward(self, key: Key, forwards: list[Key]) -> Any:
        """I, or B where backwards are not split: alone, joined with its W, or in a pair with any F."""
        model, arrays, (token, i) = self.model, self.problem.arrays, key
        stage, start = token // 3, self.starts[key]
        choices, whole = [(model.new_bool_var(""), self._length(token))], []
        if arrays.fused_seconds[stage] >= 0:
            choices.append((model.new_bool_var(""), self.unit.of(arrays.fused_seconds[stage])))
            whole.append(choices[-1][0])
        for forward in forwards if self.problem.can_pair else ():
            for kind in range(2 if self.problem.split else 1) if forward != (token - 1, i) else ():
                price = arrays.pair_seconds[forward[0] // 3, stage, kind]
                self.pairs[forward, key, kind] = var = model.new_bool_var("")
                choices.append((var, self.unit.of(price)))
                whole += [var] if kind else []
        if len(choices) == 1:
            self.ends[key] = start + choices[0][1]
            return model.new_fixed_size_interval_var(start, choices[0][1], "")
        model.add_exactly_one(var for var, _ in choices)
        if whole:
            self.joined[key] = self.joined[token + 1, i] = model.new_bool_var("")
            model.add(sum(whole) == self.joined[key])
        self.ends[key], size = self._time(), model.new_int_var(0, max(units for _, units in choices), "")
        model.add(size == sum(var * units for var, units in choices))
        return model.new_interval_var(start, size, self.ends[key], "")

    def _forward(self, key: Key) -> Any:
        """F; in a pair it starts and ends with an I, whose interval covers the pair."""
        model, length = self.model, self._length(key[0])
        pairs = [(var, back) for (forward, back, _), var in self.pairs.items() if forward == key]
        if not self.problem.can_pair:
            return model.new_fixed_size_interval_var(self.starts[key], length, "")
        alone = model.new_bool_var("")
        model.add_exactly_one([alone, *(var for var, _ in pairs)])
        for var, back in pairs:
            model.add(self.starts[key] == self.starts[back]).only_enforce_if(var)
            model.add(self.ends[key] == self.ends[back]).only_enforce_if(var)
        return model.new_optional_interval_var(self.starts[key], length, self.ends[key], alone, "")

    def _weight(self, key: Key) -> Any:
        """W; no time if it is joined with its I."""
        start, length = self.starts[key], self._length(key[0])
        if (joined := self.joined.get(key)) is None:
            self.ends[key] = start + length
            return self.model.new_fixed_size_interval_var(start, length, "")
        self.ends[key] = self._time()
        return self.model.new_interval_var(start, length - length * joined, self.ends[key], "")

    def _ascend(self, first: Key, then: Key) -> None:
        """Two microbatches of a kind and stage: a W joined with its I does not wait for an earlier one."""
        ordered = self.model.add(self.starts[then] >= self.ends[first])
        if then[0] % 3 == WEIGHT_GRAD and then in self.joined:
            ordered.only_enforce_if(~self.joined[then], ~self.joined[first])

    # --- precedence --------------------------------------------------------------------------------

    def add_precedence(self) -> None:
        """Every step starts after the arrival of its inputs."""
        model, starts, ends = self.model, self.starts, self.ends
        messages = self.problem.arrays.messages
        arrivals = self._arrivals()
        consumer = np.repeat(np.arange(len(messages.input_bounds) - 1), np.diff(messages.input_bounds)).tolist()
        for i in range(self.problem.microbatches):
            for token in range(0, 3 * self.problem.placement.num_stages, 3):
                model.add(starts[token + INPUT_GRAD, i] >= ends[token, i])
                if self.problem.split:
                    model.add(starts[token + WEIGHT_GRAD, i] >= ends[token + INPUT_GRAD, i])
                if (joined := self.joined.get((token + INPUT_GRAD, i))) is not None:
                    at_once = model.add(starts[token + WEIGHT_GRAD, i] == ends[token + INPUT_GRAD, i])
                    at_once.only_enforce_if(joined)
            for token, message in zip(consumer, messages.inputs.tolist()):
                model.add(starts[token, i] >= arrivals[message, i])
        if self.problem.objective == "span" and self.unit.is_exact:
            self._start_at_once(arrivals)

    def _start_at_once(self, arrivals: dict[Key, Any]) -> None:
        """No rank delays its first step, which would shorten its span; rounded seconds could require that.

        It starts when the last input of its microbatch arrives: the first microbatch, or any.
        """
        messages, model, starts = self.problem.arrays.messages, self.model, self.starts
        waits_for = range(1 if self.ascending else self.problem.microbatches)
        for own in self.problem.placement.stages_of_rank:
            is_first = {s: model.new_bool_var("") for s in own}
            model.add_exactly_one(is_first.values())
            for s, literal in is_first.items():
                start = starts[3 * s, 0]
                inputs = messages.inputs[slice(*messages.input_bounds[3 * s : 3 * s + 2])].tolist()
                causes = {(message, i): model.new_bool_var("") for message in inputs for i in waits_for}
                for key, cause in causes.items():
                    model.add(start == arrivals[key]).only_enforce_if(cause)
                if causes:
                    model.add(sum(causes.values()) == literal)
                else:
                    model.add(start == 0).only_enforce_if(literal)
                for other in own:
                    model.add(start <= starts[3 * other, 0]).only_enforce_if(literal)

    def _arrivals(self) -> dict[Key, Any]:
        """When each message arrives, by its number and microbatch."""
        messages, leaves = self.problem.arrays.messages, {}
        for message, token in enumerate(messages.producer.tolist()):
            for i in range(self.problem.microbatches):
                leaves[message, i] = self.ends[token, i]
                if messages.seconds[message] > 0:
                    leaves[message, i] = self.model.new_int_var(0, self.horizon, "")
                    self.model.add(leaves[message, i] >= self.ends[token, i])
        for channel in np.unique(messages.channel):
            queued = np.flatnonzero((messages.channel == channel) & (messages.seconds > 0)).tolist()
            self._queue(queued, leaves)
        return {key: leave + self.unit.of(messages.lag[key[0]]) for key, leave in leaves.items()}

    def _queue(self, queued: list[int], leaves: dict[Key, Any]) -> None:
        """Messages of one channel leave in the order of the steps that make them, one after the other."""
        model, messages = self.model, self.problem.arrays.messages
        microbatches = range(self.problem.microbatches)
        taken = {message: self.unit.of(messages.seconds[message]) for message in queued}
        for message in queued:
            for i in microbatches[1:]:
                model.add(leaves[message, i] >= leaves[message, i - 1] + taken[message])
        for (one, two), i, j in product(combinations(queued, 2), microbatches, microbatches):
            first, second = (int(messages.producer[each]) for each in (one, two))
            if first == second:  # of the same step, they leave in the order of their edges
                if i == j:
                    model.add(leaves[two, i] >= leaves[one, i] + taken[one])
                continue
            is_first = model.new_bool_var("")
            for literal, (a, x, token), (b, y, other) in (
                (is_first, (one, i, first), (two, j, second)),
                (~is_first, (two, j, second), (one, i, first)),
            ):
                model.add(leaves[b, y] >= leaves[a, x] + taken[a]).only_enforce_if(literal)
                model.add(self.ends[other, y] >= self.ends[token, x]).only_enforce_if(literal)

    # --- memory and objective ----------------------------------------------------------------------

    def add_memory(self) -> None:
        """Keep each rank within its limit: what F allocates is rounded down, what I releases is rounded up."""
        arrays, microbatches = self.problem.arrays, self.problem.microbatches
        held, by_input = arrays.memory_change[FORWARD::3], -arrays.memory_change[INPUT_GRAD::3]
        for own, limit in zip(self.problem.placement.stages_of_rank, arrays.memory_limits.tolist()):
            if not math.isfinite(limit) or sum(held[s] for s in own) * microbatches <= limit:
                continue
            amounts = [float(each[s]) for each in (held, by_input) for s in own if each[s]]
            whole = all(each == round(each) for each in amounts)
            unit = float(math.gcd(*map(round, amounts))) if whole else max(amounts) / 10_000
            lives: list[tuple[Any, int]] = []
            for s in own:
                allocated = math.floor(held[s] / unit)
                released = min(math.ceil(by_input[s] / unit), allocated)
                for last, amount in ((INPUT_GRAD, released), (WEIGHT_GRAD, allocated - released)):
                    for i in range(microbatches) if amount else ():
                        start, end = self.starts[3 * s, i], self.ends[3 * s + last, i]
                        lives.append((self.model.new_interval_var(start, self._time(), end, ""), amount))
            self.model.add_cumulative(*zip(*lives), math.floor(limit / unit + 1e-9))

    def objective(self, least: int) -> Any:
        """The last end, or the longest time between a rank's first start and its last end."""
        problem = self.problem
        span, last = self.model.new_int_var(least, self.horizon, "objective"), problem.microbatches - 1
        for (token, i), end in self.ends.items():
            if token % 3 == FORWARD or (i < last and (token, i) not in self.joined):
                continue
            if problem.objective == "makespan":
                self.model.add(span >= end)
                continue
            for other in problem.placement.stages_of_rank[problem.arrays.rank_of_stage[token // 3]]:
                self.model.add(span >= end - self.starts[3 * other, 0])
        return span

    # --- from and to orders ------------------------------------------------------------------------

    def add_hints(self, order: Ints) -> None:
        """Start from an order: when its steps start, which backwards are joined, and which pairs there are."""
        times = self.problem.start_times(order)
        together: set[Key] = set()
        pairs: dict[Key, Key] = {}
        previous: Key = (-1, -1)
        entries = number_entries(self.problem.arrays, order)
        for token, number, is_joined, begin in zip(*(each.tolist() for each in (*entries, times))):
            key = token, number
            self.model.add_hint(self.starts[key], self.unit.of(begin))
            if is_joined and token % 3 == WEIGHT_GRAD:
                together |= {key, (token - 1, number)}
            elif is_joined:
                pairs[key] = previous
            previous = key
        for key, var in self.joined.items():
            if key[0] % 3 == WEIGHT_GRAD:
                self.model.add_hint(var, key in together)
        for (forward, back, kind), var in self.pairs.items():
            self.model.add_hint(var, pairs.get(back) == forward and (back in together) == bool(kind))

    def order(self, solver: Any) -> Ints:
        """The order of a solution; zero-length steps come before others that start with them."""
        by_rank: list[list[tuple[int, bool, int, int]]] = [[] for _ in self.problem.placement.stages_of_rank]
        joined = {key for key, var in self.joined.items() if solver.value(var)}
        forward_of = {back: forward for (forward, back, _), var in self.pairs.items() if solver.value(var)}
        inside = {*forward_of.values(), *(key for key in joined if key[0] % 3 == WEIGHT_GRAD)}
        for (token, number), start in self.starts.items():
            if (token, number) not in inside:
                begin, end = solver.value(start), solver.value(self.ends[token, number])
                rank = self.problem.arrays.rank_of_stage[token // 3]
                by_rank[rank].append((begin, end > begin, number, token))
        order: list[int] = []
        for *_, number, token in (step for own in by_rank for step in sorted(own)):
            if (token, number) in forward_of:
                order += [forward_of[token, number][0], token | PAIRED]
            else:
                is_separate = token % 3 == WEIGHT_GRAD and (token, number) in self.joined
                order.append(token | SEPARATE if is_separate else token)
            if (token, number) in joined:
                order.append(token + 1)
        return np.array(order, dtype=np.int64)


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


def solve(problem: Problem, start: Ints, bound: float, effort: Effort) -> ExactResult:
    """Find an order better than `start`, or raise the lower bound from `bound`.

    The bound holds for all orders, also for those that run microbatches in any order.
    """
    unit = unit_of(problem)
    if problem.objective != "span" or not unit.is_exact or problem.microbatches == 1:
        return _solve(problem, start, bound, effort, unit, ascending=False)
    half = replace(effort, seconds=effort.seconds / 2)
    found = _solve(problem, start, bound, half, unit, ascending=False)
    best = start
    if found.order is not None and problem.fits(found.order):
        best = min(start, found.order, key=problem.value)
    if problem.value(best) <= found.bound * (1 + 1e-9):
        return ExactResult(best, found.bound)
    other = _solve(problem, best, found.bound, half, unit, ascending=True)
    return ExactResult(best if other.order is None else other.order, found.bound)


def _solve(
    problem: Problem, start: Ints, bound: float, effort: Effort, unit: Unit, *, ascending: bool
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
    built = _Model(problem, model, unit, horizon, ascending)
    built.add_steps()
    built.add_precedence()
    built.add_memory()
    model.minimize(built.objective(least))
    built.add_hints(start)
    solver = cp_model.CpSolver()
    solver.parameters.random_seed = effort.seed
    solver.parameters.catch_sigint_signal = False
    solver.parameters.num_workers = effort.workers
    limit = "max_deterministic_time" if effort.deterministic else "max_time_in_seconds"
    setattr(solver.parameters, limit, effort.seconds)
    status = _solve_in_thread(solver, model)
    # a start that is rounded down makes a span longer, by less than one unit
    rounding = 0 if unit.is_exact or problem.objective == "makespan" else 1
    bound = max(bound, (solver.best_objective_bound - rounding) * unit.seconds + optimizer_step)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return ExactResult(None, bound)
    return ExactResult(built.order(solver), bound)


def _solve_in_thread(solver: Any, model: Any) -> Any:
    """Solve in another thread, so that Ctrl-C reaches this one."""
    answers: list[Any] = []
    thread = Thread(target=lambda: answers.append(solver.solve(model)), daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(0.05)
    finally:
        if thread.is_alive():
            solver.stop_search()
        thread.join()
    return answers[0]
