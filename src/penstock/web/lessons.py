"""The lessons of the playground: short puzzles with the proved optimum as par, and the verdict on an attempt.

An attempt is a list of steps for each rank. It solves a lesson if it is valid, has only kinds of actions that
the lesson allows, stays within the memory limit, and takes no longer than par.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from penstock.arguments import listed, printable
from penstock.cost.costs import Costs
from penstock.cost.memory import exceeds
from penstock.errors import FormatError
from penstock.formats.files import read_keys
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.simulation.simulator import simulate
from penstock.validation import validate

_ROUNDING = 1e-9
_MAX_STEPS = 200  # of an attempt; the longest lesson has 36


@dataclass(frozen=True)
class Lesson:
    """One puzzle; sizes, costs and limit are given, the order is what is looked for."""

    key: str
    title: str
    goal: str
    steps: tuple[str, ...]
    """The start: the list of each rank."""
    stage_to_rank: tuple[int, ...]
    kinds: tuple[str, ...]
    """The kinds of actions that an attempt can have."""
    moves: tuple[str, ...]
    """What the page offers: `reorder`, `split` (B into I and W), `recompute`, `pair`."""
    par: float
    """The least makespan in seconds."""
    hints: tuple[str, ...]
    explanation: str
    """Shown after the lesson is solved."""
    costs: Costs = Costs()
    memory_limit: float | None = None
    """Bytes per rank; an activation is one byte."""

    @property
    def start(self) -> Schedule:
        """The schedule at the start."""
        return Schedule(self.steps, Placement(self.stage_to_rank), name=self.title)


@cache
def lessons() -> dict[str, Lesson]:
    """All lessons by key, in their order."""
    with resources.as_file(resources.files("penstock.web").joinpath("lessons.toml")) as path:
        document: Any = read_keys(path)
    relative = {"time_unit": "units", "memory_unit": "activations"}
    found = {}
    for entry in document["lesson"]:
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()
        }
        values["costs"] = Costs.from_keys(relative | entry.get("costs", {}), source="lessons.toml")
        found[entry["key"]] = Lesson(**values)
    return found


def lesson_catalogue(_: object = None) -> dict[str, Any]:
    """The lessons as the page shows them; explanations come with the verdict."""
    return {
        "lessons": [
            {key: value for key, value in vars(each).items() if key != "explanation"}
            | {
                "steps": [row.split() for row in each.steps],
                "microbatches": each.start.microbatches,
                "costs": each.costs.to_keys(),
                "time_unit": each.costs.units.time_name,
                "memory_unit": each.costs.units.memory_name,
            }
            for each in lessons().values()
        ]
    }


def judge(document: object) -> dict[str, Any]:
    """The verdict on an attempt: `{"lesson": key, "steps": [[text, ...], ...]}`."""
    lesson, schedule = _attempt(document)
    verdict = _verdict(lesson, schedule)
    return {**verdict, "par": lesson.par, "explanation": lesson.explanation if verdict["solved"] else None}


def _attempt(document: object) -> tuple[Lesson, Schedule]:
    given = document if isinstance(document, dict) else {}
    lesson = lessons().get(str(given.get("lesson")))
    rows = given.get("steps")
    problems = []
    if lesson is None:
        problems.append(f"lesson: use {listed(lessons())} (given {printable(repr(given.get('lesson')))})")
    if not (isinstance(rows, list) and all(isinstance(row, list) for row in rows)):
        problems.append("steps: expected a list of steps for each rank")
    elif not all(isinstance(step, str) for row in rows for step in row):
        problems.append("steps: a step is a text such as 0F0")
    elif sum(map(len, rows)) > _MAX_STEPS:
        problems.append(f"steps: at most {_MAX_STEPS} (given {sum(map(len, rows))})")
    if problems or lesson is None or rows is None:
        raise FormatError("request", problems)
    start = lesson.start
    return lesson, Schedule(rows, start.placement, start.microbatches, lesson.title)


def _verdict(lesson: Lesson, schedule: Schedule) -> dict[str, Any]:
    """Whether it is solved, in a sentence, and the makespan and peak memory of a valid attempt."""
    failed = {"solved": False, "makespan": None, "peak_memory": None}
    used = {str(step.kind) for row in schedule.ranks for step in row}
    if other := sorted(used - set(lesson.kinds)):
        return failed | {"message": f"This lesson uses {listed(lesson.kinds)} only: remove {listed(other)}."}
    if violations := validate(schedule):
        return failed | {"message": f"Not valid yet: {violations[0].message}."}
    timeline = simulate(schedule, lesson.costs)
    makespan, peak, units = timeline.makespan, max(timeline.peak_memory), lesson.costs.units
    found = {"makespan": makespan, "peak_memory": peak}
    if lesson.memory_limit is not None and exceeds(peak, lesson.memory_limit):
        rank = timeline.peak_memory.index(peak)
        over = f"Rank {rank} holds {units.memory(peak)}, the limit is {units.memory(lesson.memory_limit)}."
        return found | {"solved": False, "message": over}
    if makespan > lesson.par * (1 + _ROUNDING):
        longer = f"{units.time(makespan)}: {units.time(makespan - lesson.par)} above par."
        return found | {"solved": False, "message": longer}
    return found | {"solved": True, "message": f"{units.time(makespan)}: par, and no order is faster."}
