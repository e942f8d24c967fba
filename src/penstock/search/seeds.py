"""Orders that a search starts from: families, the serial order, list scheduling."""

# ruff: noqa: C901, PLR0912, PLR0915 -- a loop for a compiler
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np

from penstock.compilation import compiled
from penstock.families import build, families
from penstock.families.registry import schedule_on, training_families
from penstock.ir.encoding import Floats, Ints
from penstock.ir.kinds import Kind
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.search.kernel import FORWARD, INPUT_GRAD, WEIGHT_GRAD, MessageArrays, ProblemArrays
from penstock.search.problem import Problem

# List scheduling: builds an order step by step in time, by priority rules and within the memory limit.


class Rule(NamedTuple):
    """How a rank chooses among the steps it can take next."""

    patience: float
    """A W goes first if it delays the next F or I by at most this share of the W's seconds."""
    lead: float
    """Seconds by which an F must be able to start before an I to go before it."""
    deep_first: bool
    """Whether of two stages that can start at the same time, the later one goes first."""
    eager: bool
    """Whether an F may use memory that later stages of the rank need to finish a microbatch."""


@compiled
def _reserve(arrays: ProblemArrays, rule: Rule) -> Floats:
    """Per stage: the activations of the later stages of its rank, unless the rule is eager."""
    rank_of_stage, stages = arrays.rank_of_stage, arrays.stage_order
    reserve = np.zeros(len(rank_of_stage))
    if not rule.eager:
        for index in range(len(stages)):
            for later in stages[index + 1 :]:
                if rank_of_stage[later] == rank_of_stage[stages[index]]:
                    reserve[stages[index]] += arrays.memory_change[3 * later]
    return reserve


@compiled
def _ready(messages: MessageArrays, arrivals: Floats, token: int, number: int) -> float:
    """When all inputs of a token are there, negative if one is not known yet."""
    latest = 0.0
    for j in range(messages.input_bounds[token], messages.input_bounds[token + 1]):
        arrival = arrivals[messages.inputs[j], number]
        if arrival < 0:
            return -1.0
        latest = max(latest, arrival)
    return latest


@compiled
def list_schedule(arrays: ProblemArrays, caps: Ints, rule: Rule) -> Ints:
    """An order, empty if memory runs out; `caps` limits the microbatches in flight per stage.

    The rank that can start soonest takes the next step.
    """
    bounds, rank_of_stage = arrays.rank_bounds, arrays.rank_of_stage
    seconds, change = arrays.seconds, arrays.memory_change
    ranks, stages, m = len(bounds) - 1, len(rank_of_stage), arrays.microbatches
    done = np.zeros(3 * stages, np.int64)
    messages = arrays.messages
    arrivals = np.full((len(messages.producer), m), -1.0)
    channel_free = np.zeros(arrays.num_channels)
    clocks, live = np.zeros(ranks), np.zeros(ranks)
    positions, order = bounds[:-1].copy(), np.zeros(bounds[-1], np.int64)
    reserve = _reserve(arrays, rule)
    choices, starts = np.full(ranks, -1, np.int64), np.full(ranks, np.inf)
    is_stale = np.ones(ranks, np.bool_)
    for _ in range(len(order)):
        # the next step of every rank whose choice may have changed
        for rank in range(ranks):
            if not is_stale[rank]:
                continue
            is_stale[rank] = False
            best, start, priority, pending_weight = -1, np.inf, np.inf, -1
            for index in range(stages):
                stage = arrays.stage_order[stages - 1 - index if rule.deep_first else index]
                if rank_of_stage[stage] != rank:
                    continue
                token = 3 * stage
                number = done[token + INPUT_GRAD]
                if number < done[token]:
                    ready = _ready(messages, arrivals, token + INPUT_GRAD, number)
                    begin = max(clocks[rank], ready)
                    if ready >= 0 and begin < priority:
                        best, start, priority = token + INPUT_GRAD, begin, begin
                number = done[token]
                if number < m and number - done[token + INPUT_GRAD] < caps[stage]:
                    ready = _ready(messages, arrivals, token, number)
                    begin = max(clocks[rank], ready)
                    free = arrays.memory_limits[rank] - live[rank] - change[token] - reserve[stage]
                    if ready >= 0 and free >= 0 and begin + rule.lead < priority:
                        best, start, priority = token, begin, begin + rule.lead
                if (
                    arrays.kinds == 3
                    and done[token + WEIGHT_GRAD] < done[token + INPUT_GRAD]
                    and pending_weight < 0
                ):
                    pending_weight = token + WEIGHT_GRAD
            if pending_weight >= 0 and clocks[rank] + (1.0 - rule.patience) * seconds[pending_weight] <= start:
                best, start = pending_weight, clocks[rank]
            choices[rank], starts[rank] = best, start
        rank = -1
        for other in range(ranks):
            if choices[other] >= 0 and (rank < 0 or starts[other] < starts[rank]):
                rank = other
        if rank < 0:
            return np.zeros(0, np.int64)
        # take it
        token = choices[rank]
        order[positions[rank]] = token
        positions[rank] += 1
        clocks[rank] = starts[rank] + seconds[token]
        live[rank] += change[token]
        for j in range(messages.bounds[token], messages.bounds[token + 1]):
            leaves = clocks[rank]
            if arrays.has_queues and messages.seconds[j] > 0:
                leaves = max(leaves, channel_free[messages.channel[j]])
                channel_free[messages.channel[j]] = leaves + messages.seconds[j]
            arrivals[j, done[token]] = leaves + messages.lag[j]
            is_stale[messages.target[j]] = True
        done[token] += 1
        is_stale[rank] = True
    return order


def family_builders(problem: Problem, *, offloading: bool = False) -> dict[str, Callable[[], Schedule | None]]:
    """By name, what builds a training family; it returns None if the family does not have this placement.

    With `offloading`, families are among them that offload activations.
    """
    placement, m, graph = problem.placement, problem.microbatches, problem.stage_graph
    if not graph.is_chain:
        over_graphs = {name: family.graph_builder for name, family in families().items()}
        return {name: partial(each, graph, placement, m) for name, each in over_graphs.items() if each}
    return {
        family.name: partial(_family, problem, family.name, offloading=offloading)
        for family in training_families(placement)
    }


def _family(problem: Problem, name: str, *, offloading: bool) -> Schedule | None:
    schedule = schedule_on(name, problem.placement, problem.microbatches)
    return None if schedule and schedule.table.has(Kind.OFFLOAD) and not offloading else schedule


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


def serial(problem: Problem) -> Ints:
    """One microbatch after the other: slow, and with the least memory possible."""
    orders: list[Ints] = []
    rank_of_stage = problem.placement.stage_to_rank
    for rank in range(problem.placement.num_ranks):
        own = [s for s in problem.stage_graph.forward_order if rank_of_stage[s] == rank]
        one = [3 * s for s in own]
        for s in reversed(own):
            one += [3 * s + kind for kind in range(1, problem.arrays.kinds)]
        orders.append(np.tile(np.array(one, dtype=np.int64), problem.microbatches))
    return np.concatenate(orders)


def list_scheduled(problem: Problem, is_late: Callable[[], bool]) -> Iterator[Ints]:
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
                yield order


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
