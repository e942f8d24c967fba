"""The schedules of families that have a given placement of a chain of stages."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.errors import PenstockError
from penstock.families.registry import Family, build, families
from penstock.ir.kinds import Kind
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule

__all__ = ["offloading_schedules", "schedule_on", "training_families"]


def training_families(placement: Placement) -> list[Family]:
    """The families with backwards that can have as many stages per rank."""
    most = max(map(len, placement.stages_of_rank))
    return [each for each in families().values() if each.trains and each.stages_per_rank in (None, most)]


def schedule_on(name: str, placement: Placement, microbatches: int) -> Schedule | None:
    """The schedule of a family; None if it has another placement, or does not support these numbers."""
    counts = [len(own) for own in placement.stages_of_rank]
    try:
        schedule = build(name, ranks=placement.num_ranks, microbatches=microbatches, stages_per_rank=counts)
    except PenstockError:
        return None
    return schedule if schedule.placement == placement else None


def offloading_schedules(placement: Placement, microbatches: int) -> Iterator[Schedule]:
    """The schedules of the families that offload activations by themselves."""
    for family in training_families(placement):
        schedule = schedule_on(family.name, placement, microbatches)
        if schedule is not None and schedule.table.has(Kind.OFFLOAD):
            yield schedule
