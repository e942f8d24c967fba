"""What somebody gave, made safe to use: whole numbers of any type, and texts that go into a message."""

from __future__ import annotations

from operator import index

__all__ = ["printable", "whole_number"]


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
