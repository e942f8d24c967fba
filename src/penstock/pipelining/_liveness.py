"""How long a rank holds the activations of its stages, and slots in which they can be kept.

The activation of a forward is held up to its full backward, or its weight backward, both included:

    0F0 0F1 0I0 0W0 0F2 0I1 0W1 0B2
    |-------------|                     slot 0
        |-----------------|             slot 1
                    |-------------|     slot 0, which 0W0 has freed
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, TypeVar

from torch.distributed.pipelining import schedules as theirs

from penstock.arguments import listed
from penstock.errors import ScheduleError
from penstock.pipelining._orders import checked_schedule, parts_of

Granularity: TypeAlias = Literal["microbatch", "stage_microbatch"]
Unit: TypeAlias = tuple[int, int]
"""A stage and a microbatch."""
Lifetime: TypeAlias = tuple[int, int]
"""The positions of the forward and of the full or weight backward in the rank's list, both included."""
Found = TypeVar("Found", int, Lifetime)


@dataclass(frozen=True)
class PipelineActivationLiveness:
    """The lifetimes and slots of the activations of one rank; no tensors."""

    pp_rank: int
    granularity: Granularity
    stage_indices: tuple[int, ...]
    num_microbatches: int
    slot_by_stage_and_microbatch: Mapping[Unit, int]
    num_slots: int
    _activation_lifetime_by_stage_and_microbatch: Mapping[Unit, Lifetime] = field(repr=False)
    __hash__ = None  # type: ignore[assignment]  # as torch's: mappings have no hash

    def slot_for(self, stage_index: int, microbatch_index: int) -> int:
        """Return the slot of an activation."""
        return _found(self.slot_by_stage_and_microbatch, stage_index, microbatch_index)

    def get_activation_lifetime(self, stage_index: int, microbatch_index: int) -> Lifetime:
        """Return the positions between which an activation is held."""
        return _found(self._activation_lifetime_by_stage_and_microbatch, stage_index, microbatch_index)


def _found(values: Mapping[Unit, Found], stage: int, microbatch: int) -> Found:
    if (stage, microbatch) not in values:
        raise ScheduleError(f"stage {stage}, microbatch {microbatch} was not analyzed")
    return values[stage, microbatch]


def analyze_pipeline_activation_liveness(
    schedule: theirs.PipelineScheduleMulti,
    *,
    pp_rank: int,
    stage_indices: Sequence[int],
    granularity: Granularity,
) -> PipelineActivationLiveness:
    """Return how long a rank holds the activations of these stages, and slots for them.

    The list is that with communication, if the schedule has one. A slot is free again after the position at
    which its activation ends. With the granularity `microbatch` the stages of a microbatch share a lifetime,
    from the first forward to the last backward, and a slot. An invalid order raises an error.
    """
    if granularity not in ("microbatch", "stage_microbatch"):
        raise ScheduleError(f"granularity must be microbatch or stage_microbatch (given {granularity!r})")
    stages = tuple(stage_indices)
    if not stages or len(set(stages)) != len(stages):
        raise ScheduleError(f"stage_indices must be different stages, at least one (given {listed(stages)})")
    whole: Any = schedule
    lowered = isinstance(schedule, theirs._PipelineScheduleRuntime)
    order = (whole.pipeline_order_with_comms if lowered else whole.pipeline_order) or {}
    if pp_rank not in order:
        raise ScheduleError(f"the schedule has no rank {pp_rank}")
    microbatches = schedule._n_microbatches
    checked_schedule(order, len(order), schedule._num_stages, microbatches, type(schedule).__name__)
    units = sorted((stage, k) for stage in stages for k in range(microbatches))
    lifetimes = _lifetimes(order[pp_rank], units)
    if granularity == "microbatch":
        of = [[lifetimes[stage, k] for stage in stages] for k in range(microbatches)]
        shared = [(min(first for first, _ in each), max(last for _, last in each)) for each in of]
        lifetimes = {(stage, k): shared[k] for stage, k in units}
        slots, count = _slots(shared)
        slot_of = {(stage, k): slots[k] for stage, k in units}
    else:
        slots, count = _slots(list(lifetimes.values()))
        slot_of = dict(zip(units, slots))
    return PipelineActivationLiveness(
        *(pp_rank, granularity, stages, microbatches),
        *(MappingProxyType(slot_of), count, MappingProxyType(lifetimes)),
    )


def _lifetimes(actions: Sequence[theirs._Action | None], units: Sequence[Unit]) -> dict[Unit, Lifetime]:
    """Return the lifetimes in a rank's list, which is valid: an activation ends where its weights are done."""
    ends = (theirs.FORWARD, theirs.FULL_BACKWARD, theirs.BACKWARD_WEIGHT)
    found: dict[Unit, list[int]] = {unit: [] for unit in units}
    for position, action in enumerate(actions):
        for part in parts_of([action]):
            if part.computation_type in ends and (part.stage_index, part.microbatch_index) in found:
                found[part.stage_index, part.microbatch_index or 0].append(position)
    if incomplete := [f"{stage}F{k}" for (stage, k), positions in found.items() if len(positions) != 2]:
        raise ScheduleError(f"this rank has no forward, or no backward, of {listed(incomplete)}")
    return {unit: (positions[0], positions[1]) for unit, positions in found.items()}


def _slots(lifetimes: Sequence[Lifetime]) -> tuple[list[int], int]:
    """Return a slot for each lifetime, the lowest that is free, and how many slots there are."""
    held: list[tuple[int, int]] = []  # the end, and the slot
    free: list[int] = []
    slots = [0] * len(lifetimes)
    for nth in sorted(range(len(lifetimes)), key=lambda nth: (*lifetimes[nth], nth)):
        first, last = lifetimes[nth]
        while held and held[0][0] < first:
            heapq.heappush(free, heapq.heappop(held)[1])
        slots[nth] = heapq.heappop(free) if free else len(held)
        heapq.heappush(held, (last, slots[nth]))
    return slots, 1 + max(slots)
