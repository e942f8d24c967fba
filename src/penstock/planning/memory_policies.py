"""Memory policies of a plan: what families need to fit, by recomputation, offload or both.

What a recomputed order holds follows from the order, so most are left out by their bounds. Copies have to be
simulated. Orders with the lowest bounds come first, and only some of them are tried, unless none of these fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from typing import NamedTuple

from penstock.bounds import Bound
from penstock.cost.memory import live_activations
from penstock.families import registry as matching
from penstock.ir.kinds import Kind
from penstock.ir.schedule import Schedule
from penstock.planning.configuration import Configuration
from penstock.planning.options import Option
from penstock.planning.request import PlanRequest
from penstock.search.passes import simple_policies


class Candidate(NamedTuple):
    """A family in a configuration, whether it fits or not."""

    schedule: Schedule
    configuration: Configuration


def ordered(candidates: Sequence[Candidate], request: PlanRequest) -> list[Candidate]:
    """Those with the lowest bounds first."""

    def key(each: Candidate) -> tuple[float, int]:
        schedule, configuration = each
        bound = configuration.bound(request, split=schedule.table.has(Kind.I))
        return bound.seconds, configuration.placement.num_stages

    return sorted(candidates, key=key)


def variants(candidate: Candidate, request: PlanRequest) -> Iterator[Schedule]:
    """Yield the order with each simple memory policy that is allowed."""
    schedule, configuration = candidate
    return simple_policies(
        schedule,
        configuration.costs,
        request.memory_limit or inf,
        _peaks(schedule, configuration),
        recompute=request.recompute,
        offload=request.offload,
    )


def offloading_schedules(configuration: Configuration) -> Iterator[Schedule]:
    """The families that offload by themselves, with equally many stages on each rank."""
    if isinstance(configuration.stages_per_rank, int):
        yield from matching.offloading_schedules(configuration.placement, configuration.microbatches)


def memory_of(schedule: Schedule, configuration: Configuration) -> float | None:
    """The peak of all ranks; None if copies decide about it."""
    if schedule.table.has(Kind.OFFLOAD):
        return None
    return max(_peaks(schedule, configuration))


def bound_of(schedule: Schedule, configuration: Configuration, request: PlanRequest) -> Bound:
    """For every order of the work of this schedule."""
    table = schedule.table
    counts = None if table.has(Kind.OFFLOAD) else tuple(table.count_by_stage(Kind.RECOMPUTE).tolist())
    return configuration.bound(request, split=table.has(Kind.I), paired=table.has_pairs, recomputed=counts)


def is_dominated(options: Sequence[Option], memory: float | None, bound: Bound, jitter: float) -> bool:
    """Whether an option needs no more memory and is no slower than the bound, even with jitter."""
    return memory is not None and any(
        option.memory <= memory and option.seconds_without_jitter * (1 + jitter) <= bound.seconds
        for option in options
    )


def _peaks(schedule: Schedule, configuration: Configuration) -> list[float]:
    return [each.peak(configuration.costs, schedule.num_stages) for each in live_activations(schedule.table)]
