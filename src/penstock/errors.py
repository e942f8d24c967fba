"""Exceptions: everything Penstock raises on purpose, in one tree.

    PenstockError                the base class: one `except` catches all of them
    ├── ActionError              a text is not an action; has the position of the first error
    ├── PlacementError           an invalid mapping of stages to ranks
    ├── BuildError               an unknown family, or arguments that it does not support
    ├── FormatError              a file that cannot be parsed; lists every problem with its location
    ├── TraceError               traces that cannot be read as one run; lists every problem with its location
    ├── UnhandledKindError       a part of Penstock has no code for an action kind
    ├── ScheduleError            a schedule that cannot be created, lowered or run
    ├── CostsError               invalid costs, or costs that do not match the schedule
    ├── EstimateError            a model config or training setting that costs cannot be estimated for
    ├── PlanError                a plan request that is invalid or that no configuration satisfies
    ├── ExportError              a schedule or layout that another trainer cannot run
    ├── SearchError              a search request that is invalid or that no order satisfies
    ├── MissingExtraError        an optional dependency is not installed
    ├── PartitionError           a model cannot be split into stages as requested
    ├── BatchError               a batch cannot be split into microbatches, or outputs cannot be merged
    ├── PipelineError            stages, schedule and ranks do not match
    ├── CheckpointError          a checkpoint cannot be saved or loaded; lists every problem
    └── StepFailedError          a training step failed on some rank; the report is the same on every rank

All of them are also `ValueError`s, because almost all are about an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

__all__ = [
    "ActionError",
    "BatchError",
    "BuildError",
    "CheckpointError",
    "CostsError",
    "EstimateError",
    "ExportError",
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
    "TraceError",
    "UnhandledKindError",
]


_SHOWN_PROBLEMS = 20
"""Problems of files that a message lists; the error has all of them."""


@dataclass(frozen=True)
class Parameter:
    """A parameter that a message names: `ranks`, or `ranks=4` with a value.

    The command line writes the option in its place: `--ranks`, or `--ranks 4`.
    """

    name: str
    value: object = None

    def __str__(self) -> str:
        return self.name if self.value is None else f"{self.name}={self.value!r}"


class Message:
    """A text that can name parameters, so that each front end can write them as its users do."""

    def __init__(self, *parts: str | Parameter | Message) -> None:
        self.parts: tuple[str | Parameter, ...] = tuple(
            part for each in parts for part in (each.parts if isinstance(each, Message) else (each,))
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Message) and self.parts == other.parts

    def __hash__(self) -> int:
        return hash(self.parts)

    @staticmethod
    def join(separator: str, messages: Iterable[str | Message]) -> Message:
        """Return one message of several."""
        parts = [part for each in messages for part in (separator, each)]
        return Message(*parts[1:])

    @property
    def parameter(self) -> str:
        """The name of the first parameter, or an empty text."""
        return next((part.name for part in self.parts if isinstance(part, Parameter)), "")

    def text(self, name: Callable[[Parameter], str] = str) -> str:
        """Return the text; `name` writes a parameter."""
        return "".join(name(part) if isinstance(part, Parameter) else part for part in self.parts)

    __str__ = text


class PenstockError(ValueError):
    """The base class of all errors that Penstock raises on purpose.

    `message` is the text with the parameters that it names as values; `parameter` is the Python name of the
    parameter that is wrong, if one is.
    """

    _given: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *arguments: object, **options: object) -> Any:  # noqa: ANN401 -- an instance
        """Keep the arguments, from which pickle makes the same error."""
        error = super().__new__(cls)
        error._given = arguments, options
        return error

    def __init__(self, *parts: str | Parameter | Message, parameter: str = "") -> None:
        self.message = Message(*parts)
        super().__init__(str(self.message))
        self.parameter = parameter or self.message.parameter

    def __reduce__(self) -> tuple[Any, ...]:
        arguments, options = self._given
        return partial(type(self), **options), arguments


def _lines(problems: Sequence[str | Message], location: str = "") -> Message:
    """Return the first problems, one per line, and the number of the others."""
    shown: list[str | Message] = list(problems[:_SHOWN_PROBLEMS])
    if (more := len(problems) - _SHOWN_PROBLEMS) > 0:
        shown.append(f"and {more} more problem{'s' * (more > 1)}")
    return Message.join("\n", [Message(location, each) for each in shown])


class ActionError(PenstockError):
    """A text is not an action; `position` is the index of the first wrong character."""

    def __init__(self, text: str, position: int, reason: str, location: str = "") -> None:
        shown = text if len(text) <= 60 else text[:57] + "..."
        place = f"{location}: " if location else ""
        super().__init__(f"{place}{shown!r} is not an action: {reason} (at position {position})")
        self.text = text
        self.position = position
        self.reason = reason
        self.location = location

    def at(self, location: str) -> ActionError:
        """The same error with the place of the text, which its message begins with."""
        return ActionError(self.text, self.position, self.reason, location)


class PlacementError(PenstockError):
    """An invalid mapping of stages to ranks."""


class BuildError(PenstockError):
    """An unknown family, or arguments that it does not support."""


class FormatError(PenstockError):
    """A file that cannot be parsed; `problems` has one sentence per problem, with its location."""

    def __init__(self, source: str, problems: Sequence[str | Message]) -> None:
        super().__init__(_lines(problems, f"{source}: "))
        self.source = source
        self.problems = tuple(map(str, problems))


class TraceError(PenstockError):
    """Traces that cannot be read as one run; `problems` has one sentence per problem, with its location."""

    def __init__(self, problems: Sequence[str | Message]) -> None:
        super().__init__(_lines(problems))
        self.problems = tuple(map(str, problems))


class UnhandledKindError(PenstockError):
    """A part of Penstock has no code for an action kind; `kind` is its text, `component` names the part."""

    def __init__(self, kind: str, component: str) -> None:
        super().__init__(f"{component} does not handle actions of kind {kind}")
        self.kind = kind
        self.component = component


class ScheduleError(PenstockError):
    """A schedule that cannot be created, lowered or run."""


class CostsError(PenstockError):
    """Invalid costs, or costs that do not match the schedule; `problems` has one sentence per wrong cost."""

    def __init__(self, *parts: str | Parameter | Message, problems: Mapping[str, str] | None = None) -> None:
        super().__init__(*parts)
        self.problems = dict(problems or {})


class EstimateError(PenstockError):
    """A model config or training setting that costs cannot be estimated for."""


class PlanError(PenstockError):
    """A plan request that is invalid or that no configuration satisfies."""


class ExportError(PenstockError):
    """A schedule or layout that another trainer cannot run."""


class SearchError(PenstockError):
    """A search request that is invalid or that no order satisfies."""


class MissingExtraError(PenstockError, ImportError):
    """An optional dependency is not installed."""


class PartitionError(PenstockError):
    """A model cannot be split into stages as requested."""


class BatchError(PenstockError):
    """A batch cannot be split into microbatches, or outputs cannot be merged."""


class PipelineError(PenstockError):
    """Stages, schedule and ranks do not match."""


class CheckpointError(PenstockError):
    """A checkpoint cannot be saved or loaded; `problems` has one sentence per problem."""

    def __init__(self, summary: str, problems: Sequence[str]) -> None:
        super().__init__("\n  ".join([f"{summary}:", *problems]))
        self.summary = summary
        self.problems = tuple(problems)


class FailureKind(str, Enum):
    """How a step failed."""

    EXCEPTION = "exception"
    INTERRUPTED = "interrupted"
    TIMEOUT = "timeout"
    LOST = "lost"
    """A process ended or a connection broke."""

    __str__ = str.__str__


class StepFailedError(PenstockError):
    """A training step failed on some rank; every rank raises this error with the same report.

    `rank` is the rank that failed first, or that the others waited for too long, None if it belongs to another
    pipeline; `world_rank` is its rank in the job. `action` is the action it was executing, with its `stage` and
    `microbatch` if it has them. `details` is the original traceback. `reporter` is the world rank
    that prints the report if the error is not caught; the others print one line.
    """

    def __init__(
        self,
        report: str,
        rank: int | None = None,
        action: str | None = None,
        stage: int | None = None,
        microbatch: int | None = None,
        kind: FailureKind = FailureKind.EXCEPTION,
        details: str = "",
        world_rank: int | None = None,
        reporter: int | None = None,
    ) -> None:
        super().__init__(report)
        self.report = report
        self.rank = rank
        self.action = action
        self.stage = stage
        self.microbatch = microbatch
        self.kind = kind
        self.details = details
        self.world_rank = world_rank
        self.reporter = reporter
