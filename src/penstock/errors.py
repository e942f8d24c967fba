"""Every way Penstock refuses something, in one tree.

    PenstockError                what all of these are, so that one `except` catches everything
    ├── ActionError              a text that is not an action, with the position of the fault
    ├── PlacementError           a mapping of stages to ranks that cannot be
    ├── BuildError               a family that is unknown, or numbers it cannot be built for
    ├── FormatError              a file that is not a schedule, with every fault and its place
    ├── UnhandledKindError       an action kind that a part of Penstock has nothing for
    ├── ScheduleError            a schedule that cannot be made, lowered or run as it stands
    ├── CostsError               costs that cannot be, or that do not fit a schedule
    ├── PlanError                a model that cannot be planned for as asked, or nothing that fits
    ├── SearchError              work and limits that no order can meet
    ├── MissingExtraError        something that needs an optional dependency which is not installed
    ├── PartitionError           a model that cannot be cut into stages as asked
    ├── BatchError               a batch that cannot be cut into microbatches, or outputs that cannot be merged
    ├── PipelineError            stages, schedule and ranks that do not fit together
    ├── CheckpointError          a checkpoint that cannot be saved or loaded, with every fault
    └── StepFailedError          a step that failed on some rank: the same report on every rank

All of them are `ValueError`s too, because nearly each is about a value somebody gave.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "ActionError",
    "BatchError",
    "BuildError",
    "CheckpointError",
    "CostsError",
    "FormatError",
    "MissingExtraError",
    "PartitionError",
    "PenstockError",
    "PipelineError",
    "PlacementError",
    "PlanError",
    "ScheduleError",
    "SearchError",
    "StepFailedError",
    "UnhandledKindError",
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


class UnhandledKindError(PenstockError):
    """An action kind that a part of Penstock has nothing for; `kind` is its text, `room` names the part."""

    def __init__(self, kind: str, room: str) -> None:
        super().__init__(f"{room} does not handle actions of kind {kind}")
        self.kind = kind
        self.room = room

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.kind, self.room)


class ScheduleError(PenstockError):
    """A schedule that cannot be made, lowered or run as it stands."""


class CostsError(PenstockError):
    """Costs that cannot be, or that do not fit a schedule."""


class PlanError(PenstockError):
    """A model that cannot be planned for as asked, or nothing that fits."""


class SearchError(PenstockError):
    """Work and limits that no order can meet, or a search that was asked for wrongly."""


class MissingExtraError(PenstockError, ImportError):
    """Something that needs an optional dependency which is not installed."""


class PartitionError(PenstockError):
    """A model that cannot be cut into stages as asked."""


class BatchError(PenstockError):
    """A batch that cannot be cut into microbatches, or outputs that cannot be merged."""


class PipelineError(PenstockError):
    """Stages, schedule and ranks that do not fit together."""


class CheckpointError(PenstockError):
    """A checkpoint that cannot be saved or loaded; `faults` has one sentence for each thing that is wrong."""

    def __init__(self, summary: str, faults: Sequence[str]) -> None:
        super().__init__("\n  ".join([f"{summary}:", *faults]))
        self.summary = summary
        self.faults = tuple(faults)

    def __reduce__(self) -> tuple[type, tuple[str, tuple[str, ...]]]:
        return type(self), (self.summary, self.faults)


class StepFailedError(PenstockError):
    """A step that failed on some rank; every rank raises it with the same report.

    `rank` is where it began, `action` what that rank was doing, `stage` and `microbatch` are that action's,
    where it has them; `kind` is `exception`, `timeout` or `lost`; `details` is the original traceback.
    """

    def __init__(
        self,
        report: str,
        rank: int | None = None,
        action: str | None = None,
        stage: int | None = None,
        microbatch: int | None = None,
        kind: str = "exception",
        details: str = "",
    ) -> None:
        super().__init__(report)
        self.report = report
        self.rank = rank
        self.action = action
        self.stage = stage
        self.microbatch = microbatch
        self.kind = kind
        self.details = details

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        given = (self.report, self.rank, self.action, self.stage, self.microbatch, self.kind, self.details)
        return type(self), given
