"""An export: the files and flags with which another trainer runs a schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.arguments import plural
from penstock.errors import ExportError, Message
from penstock.formats import write_text
from penstock.ir.kinds import MEMORY_KINDS
from penstock.ir.schedule import Schedule
from penstock.planning.layout import PipelineLayout
from penstock.recognition import Recognition, recognize
from penstock.validation import invalid_schedule_error, validate


@dataclass(frozen=True)
class Export:
    """What another trainer needs; `notes` are sentences for the user."""

    trainer: str
    files: Mapping[str, str]
    """The text of each file, by name."""
    flags: Sequence[str]
    notes: Sequence[str] = ()

    def write(self, directory: Path) -> None:
        """Write all files, each atomically."""
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in self.files.items():
            write_text(text, directory / name)


def check_schedule(schedule: Schedule, trainer: str) -> tuple[Recognition, list[str | Message]]:
    """The family of a schedule, and why no other trainer can run it."""
    if violations := validate(schedule):
        raise invalid_schedule_error(schedule, violations)
    problems: list[str | Message] = []
    if not schedule.graph.is_chain:
        problems.append(
            f"{trainer} runs stages in a chain only, and this schedule has another stage graph; nearest is "
            "1f1b with the stages in a chain"
        )
    techniques = [kind.name for kind in MEMORY_KINDS if schedule.table.has(kind)]
    if techniques:
        problems.append(
            f"{trainer} has no actions {', '.join(techniques)}: export the schedule without them, and choose "
            "recomputation or offload in its own settings"
        )
    return recognize(schedule), problems


def check_layout(schedule: Schedule, layout: PipelineLayout, *, can_be_empty: bool) -> list[str]:
    """Why a layout does not fit a schedule."""
    problems = []
    if len(layout) != schedule.num_stages:
        problems.append(
            f"the layout {layout} has {plural(len(layout), 'stage')}, the schedule {schedule.num_stages}"
        )
    empty = [stage for stage, part in enumerate(layout) if part.is_empty]
    if empty and not can_be_empty:
        problems.append(f"stage {empty[0]} of the layout {layout} is empty; give it a layer")
    return problems


def raise_problems(trainer: str, schedule: Schedule, problems: Sequence[str | Message]) -> None:
    """Raise all problems at once."""
    if problems:
        lines = [f"{schedule.name} cannot be exported to {trainer}:", *problems]
        raise ExportError(Message.join("\n  ", lines))
