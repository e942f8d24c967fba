"""Live activations under the planner's names."""

from __future__ import annotations

from penstock.cost.memory import LiveActivations as Holding
from penstock.cost.memory import fixed_bytes_of as fixed_bytes
from penstock.cost.memory import live_activations
from penstock.ir.schedule import Schedule

__all__ = ["Holding", "fixed_bytes", "holdings"]


def holdings(schedule: Schedule) -> list[Holding]:
    """One for each rank of a compute schedule."""
    return live_activations(schedule.table)
