"""What somebody gave, made safe to use: whole numbers of any type, texts and lists that go into a message."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index

__all__ = ["listed", "printable", "some", "whole_number"]


def whole_number(value: object) -> int | None:
    """The value as an `int` if it is a whole number of any type, numpy's included; a bool is none."""
    if isinstance(value, bool):
        return None
    try:
        return index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def printable(text: str, most: int = 60) -> str:
    """A text somebody else wrote, as one short line that cannot steer a terminal."""
    shown = text if len(text) <= most else text[: most - 3] + "..."
    return shown if shown.isprintable() else ascii(shown)


def listed(values: Iterable[object]) -> str:
    """All of them, one after the other."""
    return ", ".join(map(str, values))


def some(values: Sequence[object], most: int = 8) -> str:
    """The first of them, and how many there are besides."""
    more = len(values) - most
    return listed(values[:most]) + (f", and {more} more" if more > 0 else "")
