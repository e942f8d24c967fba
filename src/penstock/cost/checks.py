"""Checks of one cost: a number, or a list of numbers, from 0 to the largest plausible one."""

from __future__ import annotations

from penstock.arguments import printable

__all__ = ["problem_of"]

_MOST = 1e18  # the largest plausible number of seconds or bytes


def _shown(number: float) -> str:
    # a whole number can have more digits than Python is willing to print
    return printable(repr(number)) if abs(number) < _MOST or number != number else "more"  # noqa: PLR0124 -- nan


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
        if not 0 <= number <= _MOST:
            return f"it must be from 0 to {_MOST:g} (given {_shown(number)})"
    return None
