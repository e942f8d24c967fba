"""The report of `penstock demo`: predicted and measured steps of a schedule, as timelines and tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING

from rich.table import Table

from penstock.simulation.calibration import errors_by_kind
from penstock.simulation.timeline import Timeline

if TYPE_CHECKING:
    from penstock.runtime.demo.training import Step

__all__ = ["MeasuredSchedule", "kind_table", "schedule_rows", "schedule_table"]


@dataclass(frozen=True)
class MeasuredSchedule:
    """One schedule: the predicted timeline, and the measured steps."""

    predicted: Timeline
    steps: list[list[Step]]
    """By step and rank."""

    @property
    def name(self) -> str:
        """The name of the schedule."""
        return self.predicted.schedule.name

    @property
    def timelines(self) -> list[Timeline]:
        """The measured timelines, one per step."""
        return [ranks[0].timeline for ranks in self.steps]

    @property
    def seconds(self) -> float:
        """The mean measured makespan."""
        return fmean(timeline.makespan for timeline in self.timelines)

    @property
    def pictures(self) -> Iterator[Timeline]:
        """The predicted timeline, and the measured one of median makespan; memory is in activations."""
        median = sorted(self.timelines, key=lambda timeline: timeline.makespan)[len(self.steps) // 2]
        for label, timeline in (("predicted", self.predicted), ("measured", median)):
            named = timeline.schedule.renamed(f"{timeline.schedule.name}, {label}")
            costs = replace(timeline.costs, activation_message=0, gradient_message=0)  # these are bytes
            yield replace(timeline, schedule=named, costs=costs)

    @property
    def bubble(self) -> float:
        """The mean measured bubble rate."""
        return fmean(timeline.bubble_rate for timeline in self.timelines)

    @property
    def live(self) -> int:
        """The peak number of live activations of any rank."""
        return max(step.live for ranks in self.steps for step in ranks)


def kind_table(measured: Sequence[MeasuredSchedule]) -> Table:
    """Predicted and measured mean time per kind of action, and of the step."""
    table = _table("kind", "predicted ms", "measured ms", "error")
    for each in measured:
        for row in errors_by_kind(each.predicted, each.timelines):
            times = (f"{seconds * 1e3:.2f}" for seconds in (row.predicted, row.measured))
            table.add_row(each.name, row.kind, *times, f"{row.error:+.1%}")
    return table


def schedule_table(measured: Sequence[MeasuredSchedule]) -> Table:
    """Step time, bubble and peak live activations per schedule."""
    (_, *columns), *rows = schedule_rows(measured)
    table = _table(*columns)
    for row in rows:
        table.add_row(*row)
    return table


def schedule_rows(measured: Sequence[MeasuredSchedule]) -> list[list[str]]:
    """The names of the columns, and then a row per schedule."""
    rows = [["schedule", "predicted step", "measured step", "bubble", "peak live activations"]]
    for each in measured:
        times = (f"{seconds * 1e3:.1f} ms" for seconds in (each.predicted.makespan, each.seconds))
        rows.append([each.name, *times, f"{each.bubble:.1%}", str(each.live)])
    return rows


def _table(*columns: str) -> Table:
    """An empty table with the schedule and these columns."""
    table = Table(box=None, pad_edge=False)
    table.add_column("schedule")
    for name in columns:
        table.add_column(name, justify="right")
    return table
