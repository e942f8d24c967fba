"""Checks of costs: each is a number, or a list of numbers, from 0 to the largest plausible one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from penstock.arguments import printable
from penstock.cost.values import Cost, as_tuple

__all__ = ["part_problems", "problem_of", "speed_problems"]

_MAX_PLAUSIBLE = 1e18  # the largest plausible number of seconds or bytes


def _shown(number: float) -> str:
    # a whole number can have more digits than Python is willing to print
    return printable(repr(number)) if abs(number) < _MAX_PLAUSIBLE or number != number else "more"  # noqa: PLR0124 -- nan


def problem_of(value: object, *, many: bool, optional: bool) -> str | None:
    """What is wrong with the value of a cost, in a sentence about "it"."""
    if value is None and optional:
        return None
    if isinstance(value, tuple) and not (many and value):
        return "it must be one number" if not many else "the list is empty"
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, bool) or not isinstance(number, int | float):
            return (
                f"it must be a number{' or a list of them' if many else ''} (given {printable(repr(number))})"
            )
        if not 0 <= number <= _MAX_PLAUSIBLE:
            return f"it must be from 0 to {_MAX_PLAUSIBLE:g} (given {_shown(number)})"
    return None


def speed_problems(speeds: Mapping[str, Cost | None]) -> Iterator[str]:
    """What is wrong with bandwidths that are given."""
    for name, speed in speeds.items():
        if speed is not None and min(as_tuple(speed)) <= 0:
            yield f"{name}: it must be more than 0"


def part_problems(activation: Cost, parts: Mapping[str, Cost | None]) -> Iterator[str]:
    """What is wrong with parts of the activation, which cannot be larger than it."""
    whole = as_tuple(activation)
    for name, given in parts.items():
        part = whole if given is None else as_tuple(given)
        stages = max(len(part), len(whole))
        both = (each * stages if len(each) == 1 else each for each in (part, whole))
        if any(p > w for p, w in zip(*both)):
            yield f"{name}: it cannot be more than activation"
