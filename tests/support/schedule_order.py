"""Whether a schedule runs the microbatches of each stage in order, so that sums have the same bits."""

from __future__ import annotations

from penstock import Kind, Schedule

__all__ = ["backwards_in_order", "forwards_in_order"]


def _in_order(schedule: Schedule, *kinds: Kind) -> bool:
    seen: dict[int, int] = {}
    for row in schedule.ranks:
        for step in row:
            for part in step.parts:
                if part.kind in kinds and part.microbatch is not None:
                    if part.microbatch < seen.get(part.stage, -1):
                        return False
                    seen[part.stage] = part.microbatch
    return True


def backwards_in_order(schedule: Schedule) -> bool:
    """Whether each stage adds up its gradients in the order of the microbatches, as one process does."""
    return _in_order(schedule, Kind.B, Kind.I) and _in_order(schedule, Kind.B, Kind.W)


def forwards_in_order(schedule: Schedule) -> bool:
    """Whether each stage sees the microbatches in their order."""
    return _in_order(schedule, Kind.F)
