"""The value of one cost: a number, or a tuple of numbers with one per stage, rank or edge."""

from __future__ import annotations

from typing import TypeAlias

__all__ = ["Cost", "as_tuple", "times"]

Cost: TypeAlias = float | tuple[float, ...]


def as_tuple(value: Cost) -> tuple[float, ...]:
    """All numbers of the value."""
    return value if isinstance(value, tuple) else (value,)


def times(value: Cost | None, factor: float) -> Cost | None:
    """Every number of the value multiplied by a factor; None, which is not given, stays."""
    if value is None:
        return None
    return tuple(x * factor for x in value) if isinstance(value, tuple) else value * factor
