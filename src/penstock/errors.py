"""Every way Penstock refuses something, in one tree.

    PenstockError                what all of these are, so that one `except` catches everything
    ├── ActionError              a text that is not an action, with the position of the fault
    ├── PlacementError           a mapping of stages to ranks that cannot be
    ├── BuildError               a family that is unknown, or numbers it cannot be built for
    ├── FormatError              a file that is not a schedule, with every fault and its place
    ├── ScheduleError            a schedule that cannot be made, lowered or run as it stands
    ├── CostsError               costs that cannot be, or that do not fit a schedule
    └── MissingExtraError        something that needs an optional dependency which is not installed

All of them are `ValueError`s too: each is about a value somebody gave.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "ActionError",
    "BuildError",
    "CostsError",
    "FormatError",
    "MissingExtraError",
    "PenstockError",
    "PlacementError",
    "ScheduleError",
]


class PenstockError(ValueError):
    """The base of every error that Penstock raises on purpose."""


class ActionError(PenstockError):
    """A text that is not an action; `position` is the index of the first wrong character."""

    def __init__(self, text: str, position: int, reason: str) -> None:
        shown = text if len(text) <= 60 else text[:57] + "..."
        super().__init__(f"{shown!r} is not an action: {reason} (at position {position})")
        self.text = text
        self.position = position
        self.reason = reason

    def __reduce__(self) -> tuple[type, tuple[str, int, str]]:
        return type(self), (self.text, self.position, self.reason)


class PlacementError(PenstockError):
    """A mapping of stages to ranks that cannot be."""


class BuildError(PenstockError):
    """A family that is unknown, or numbers it cannot be built for."""


class FormatError(PenstockError):
    """A file that is not a schedule; `faults` has one sentence for each place that is wrong."""

    def __init__(self, source: str, faults: Sequence[str]) -> None:
        super().__init__("\n".join(f"{source}: {fault}" for fault in faults))
        self.source = source
        self.faults = tuple(faults)

    def __reduce__(self) -> tuple[type, tuple[str, tuple[str, ...]]]:
        return type(self), (self.source, self.faults)


class ScheduleError(PenstockError):
    """A schedule that cannot be made, lowered or run as it stands."""


class CostsError(PenstockError):
    """Costs that cannot be, or that do not fit a schedule."""


class MissingExtraError(PenstockError):
    """Something that needs an optional dependency which is not installed."""
