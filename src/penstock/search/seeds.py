"""Orders that a search starts from: families, list scheduling by many rules, and the serial order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np

from penstock.errors import PenstockError
from penstock.families import build, families
from penstock.families.registry import schedule_on, training_families
from penstock.ir.encoding import Ints
from penstock.ir.kinds import Kind
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.search.kernel_arrays import FORWARD
from penstock.search.list_scheduling import Rule, list_schedule
from penstock.search.problem import Problem
from penstock.search.zbv_greedy import zbv_greedy


class Seed(NamedTuple):
    """An order and how it was made."""

    name: str
    order: Ints


def family_schedules(problem: Problem) -> Iterator[Schedule]:
    """Every training family that has this placement; on a graph that is not a chain, those over graphs."""
    built = (builder() for builder in family_builders(problem).values())
    yield from (schedule for schedule in built if schedule is not None)


def family_builders(problem: Problem, *, offloading: bool = False) -> dict[str, Callable[[], Schedule | None]]:
    """By name, what builds a training family; it returns None if the family does not have this placement.

    With `offloading`, families are among them that offload activations.
    """
    placement, m, graph = problem.placement, problem.microbatches, problem.stage_graph
    if not graph.is_chain:
        over_graphs = {name: family.graph_builder for name, family in families().items()}
        return {name: partial(each, graph, placement, m) for name, each in over_graphs.items() if each}
    found: dict[str, Callable[[], Schedule | None]] = {
        family.name: partial(_family, problem, family.name, offloading=offloading)
        for family in training_families(placement)
    }
    if placement.style == "v" and len(placement.stages_of_rank[0]) == 2:
        found["zbv-greedy"] = partial(_zbv_greedy, problem)
    return found


def _family(problem: Problem, name: str, *, offloading: bool) -> Schedule | None:
    schedule = schedule_on(name, problem.placement, problem.microbatches)
    if schedule is None or (schedule.table.has(Kind.OFFLOAD) and not offloading):
        return None
    return schedule


def _zbv_greedy(problem: Problem) -> Schedule | None:
    try:
        return zbv_greedy(
            problem.placement.num_ranks, problem.microbatches, problem.costs, problem.memory_limit
        )
    except PenstockError:  # unequal stages, or too little memory
        return None


def grouped_schedules(problem: Problem) -> Iterator[Schedule]:
    """The training families that have this placement and groups, with groups other than the default."""
    placement, m = problem.placement, problem.microbatches
    counts, ranks = [len(own) for own in placement.stages_of_rank], placement.num_ranks
    is_loop = problem.stage_graph.is_chain and placement == Placement.loop(ranks, counts)
    if max(counts) == 1 or not is_loop:
        return
    for name, family in families().items():
        if family.trains:
            for group in family.typical_groups(ranks, m):
                yield build(name, ranks=ranks, microbatches=m, stages_per_rank=counts, group=group)


def serial(problem: Problem) -> Seed:
    """One microbatch after the other: slow, and with the least memory possible."""
    orders: list[Ints] = []
    hosts = problem.placement.stage_to_rank
    for rank in range(problem.placement.num_ranks):
        own = [s for s in problem.stage_graph.forward_order if hosts[s] == rank]
        one = [3 * s for s in own]
        for s in reversed(own):
            one += [3 * s + kind for kind in range(1, problem.arrays.kinds)]
        orders.append(np.tile(np.array(one, dtype=np.int64), problem.microbatches))
    return Seed("serial order", np.concatenate(orders))


def list_scheduled(problem: Problem, is_late: Callable[[], bool]) -> Iterator[Seed]:
    """Orders built by list scheduling, those that fit, until it is late."""
    arrays = problem.arrays
    step = float(arrays.seconds.mean())
    caps = list(_caps(problem))
    patiences = (0.0, 0.3, 0.6, 0.9) if problem.split else (0.0,)
    several = problem.placement.num_stages > problem.placement.num_ranks
    leads = (0.25, -0.25, 0.0, 2.0, 1e3)
    for cap, lead, patience in product(caps, leads, patiences):
        for deep_first, eager in product((True, False) if several else (True,), repeat=2):
            if is_late():
                return
            order = list_schedule(arrays, cap, Rule(patience, lead * step, deep_first, eager))
            if len(order) and problem.fits(order):
                yield Seed("list scheduling", order)


def _caps(problem: Problem) -> Iterator[Ints]:
    """Limits on microbatches in flight per stage: none, what fills the memory, what hides the round trip."""
    placement, stages, work = problem.placement, problem.placement.num_stages, problem.work
    yield np.full(stages, problem.microbatches, dtype=np.int64)
    if problem.memory_limit is not None and stages > placement.num_ranks:
        yield _filling_caps(problem, exceeding=False)
        yield _filling_caps(problem, exceeding=True)
    slowest = max(map(work.seconds_of, range(placement.num_ranks))) / problem.microbatches
    for more in (0, 1, 2):
        needed = (work.round_trip(s) / slowest if slowest else 0.0 for s in range(stages))
        most = (min(each, problem.microbatches) for each in needed)
        yield np.array([math.ceil(each - 1e-9) + more or 1 for each in most], dtype=np.int64)


def _filling_caps(problem: Problem, *, exceeding: bool) -> Ints:
    """Per stage: its part of the memory of its rank, by how long it holds an activation.

    It is rounded up (`exceeding`), or as far as the memory allows, for the greatest remainder first.
    """
    work, sizes = problem.work, problem.arrays.memory_change[FORWARD::3].tolist()
    lives = [work.round_trip(s) + work.input_gradient[s] + work.weight_gradient[s] for s in range(len(sizes))]
    caps = np.full(len(sizes), problem.microbatches, dtype=np.int64)
    for own, limit in zip(problem.placement.stages_of_rank, problem.arrays.memory_limits.tolist()):
        if not (byte_seconds := sum(lives[s] * sizes[s] for s in own)):
            continue
        parts = {s: min(lives[s] * limit / byte_seconds, problem.microbatches) for s in own}
        for s, part in parts.items():
            caps[s] = max(math.ceil(part - 1e-6) if exceeding else math.floor(part + 1e-6), 1)
        for s in sorted(own, key=lambda s: math.floor(parts[s]) - parts[s]):
            if sum(sizes[other] * caps[other] for other in own) + sizes[s] <= limit:
                caps[s] += 1
    return caps
