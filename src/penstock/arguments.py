"""Arguments and messages: accept integers of any type, and format foreign text and lists for messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index

__all__ = ["listed", "printable", "some", "whole_number"]


def whole_number(value: object) -> int | None:
    """Convert an integer of any type, such as numpy's, to `int`; return None for a bool and everything else."""
    if isinstance(value, bool):
        return None
    try:
        return index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def printable(text: str, most: int = 60) -> str:
    """Shorten foreign text to `most` characters on one line, and escape control characters."""
    shown = text if len(text) <= most else text[: most - 3] + "..."
    return shown if shown.isprintable() else ascii(shown)


def listed(values: Iterable[object]) -> str:
    """Join all values with commas."""
    return ", ".join(map(str, values))


def some(values: Sequence[object], most: int = 8) -> str:
    """Join the first values with commas, and append the number of the others."""
    more = len(values) - most
    return listed(values[:most]) + (f", and {more} more" if more > 0 else "")
