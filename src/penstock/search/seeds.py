"""Where a search starts: every family of the same work, and orders made by many rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

import numpy as np

from penstock.bounds import Workload
from penstock.errors import PenstockError
from penstock.families import families
from penstock.ir.schedule import Schedule
from penstock.ir.table import Ints
from penstock.search.list_scheduling import Rule, make
from penstock.search.problem import Problem
from penstock.search.zbv_greedy import zbv_greedy

__all__ = ["Seed", "family_schedules", "made", "serial"]


class Seed(NamedTuple):
    """An order and where it comes from."""

    name: str
    order: Ints


def family_schedules(problem: Problem) -> Iterator[Schedule]:
    """Every family that trains on this placement."""
    placement, m = problem.placement, problem.microbatches
    legs, rest = divmod(placement.num_stages, placement.num_ranks)
    if rest:
        return
    for name, family in families().items():
        if name == "forward-only" or family.stages_per_rank not in (None, legs):
            continue
        try:
            schedule = family.builder(placement.num_ranks, m, legs)
        except PenstockError:  # not for these numbers
            continue
        if schedule.placement == placement:
            yield schedule
    if placement.style == "v" and legs == 2:
        try:
            yield zbv_greedy(placement.num_ranks, m, problem.costs, problem.memory_limit)
        except PenstockError:  # stages that differ, or too little memory for it
            return


def serial(problem: Problem) -> Seed:
    """One microbatch after the other: slow, but with the least memory there can be."""
    rows: list[int] = []
    for own in problem.placement.stages_of_rank:
        one = [3 * s for s in own]
        for s in reversed(own):
            one += [3 * s + k for k in range(1, problem.tables.kinds)]
        rows += one * problem.microbatches
    return Seed("one microbatch after the other", np.array(rows, dtype=np.int64))


def made(problem: Problem, late: Callable[[], bool]) -> Iterator[Seed]:
    """Orders made by rules, the ones that fit, until it is late."""
    tables = problem.tables
    step = float(tables.seconds.mean())
    caps = list(_caps(problem))
    patiences = (0.0, 0.3, 0.6, 0.9) if problem.split else (0.0,)
    several = problem.placement.num_stages > problem.placement.num_ranks
    leads = (0.25, -0.25, 0.0, 2.0, 1e3)
    for cap, lead, patience in product(caps, leads, patiences):
        for deep_first, eager in product((True, False) if several else (True,), repeat=2):
            if late():
                return
            order = make(tables, cap, Rule(patience, lead * step, deep_first, eager))
            if len(order) and problem.fits(order):
                yield Seed(f"made with {lead:g} steps of lead, patience {patience:g}", order)


def _caps(problem: Problem) -> Iterator[Ints]:
    """As many microbatches as there are, and as few as hide the way there and back, and a few more."""
    placement, stages = problem.placement, problem.placement.num_stages
    work = Workload(placement, problem.microbatches, problem.costs, split=problem.split)
    yield np.full(stages, problem.microbatches, dtype=np.int64)
    slowest = max(map(work.seconds_of, range(placement.num_ranks))) / problem.microbatches
    for more in (0, 1, 2):
        needed = (work.round_trip(s) / slowest if slowest else 0.0 for s in range(stages))
        most = (min(each, problem.microbatches) for each in needed)
        yield np.array([math.ceil(each - 1e-9) + more or 1 for each in most], dtype=np.int64)
