"""A violation: what is wrong, where, and what to try."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.arguments import printable
from penstock.display import Displayed
from penstock.errors import ScheduleError
from penstock.ir.action import Action, Step
from penstock.ir.encoding import JOINED, decode
from penstock.ir.schedule import Schedule
from penstock.ir.table import ActionTable, step_of_slot
from penstock.validation.send_model import SendModel


@dataclass(frozen=True)
class Wait:
    """One link of a cycle: this step waits for that step, which is on another rank or earlier in the list."""

    rank: int
    step: int
    action: Step
    for_rank: int
    for_step: int
    for_action: Step
    why: str

    def __str__(self) -> str:
        return (
            f"rank {self.rank}, step {self.step}: {self.action} waits for "
            f"{self.for_action} (rank {self.for_rank}, step {self.for_step}): {self.why}"
        )


@dataclass(frozen=True)
class Violation:
    """One violation. `code` is stable, `step` counts from 0 in the rank's list; None where there is none."""

    code: str
    message: str
    suggestion: str
    rank: int | None = None
    step: int | None = None
    action: Step | None = None
    cycle: tuple[Wait, ...] = ()
    """For a deadlock: the waits, each for a step that cannot run before the next one has."""
    send_models: tuple[SendModel, ...] = ()
    """For a deadlock: the send models under which it happens."""

    @property
    def where(self) -> str:
        """The place as text: `rank 1, step 3, 2B0`, or as much of it as is known."""
        named = (("rank ", self.rank), ("step ", self.step), ("", self.action))
        return ", ".join(f"{name}{value}" for name, value in named if value is not None)

    def __str__(self) -> str:
        place = f" {self.where}" if self.where else ""
        lines = [f"error[{self.code}]{place}: {self.message}"]
        lines += [f"  {wait}" for wait in self.cycle]
        return "\n".join([*lines, f"  try: {self.suggestion}"])


class Violations(list[Violation], Displayed):
    """The violations of a schedule up to a send model; an empty list when it is valid."""

    def __init__(self, found: Iterable[Violation], schedule: Schedule, send_model: SendModel) -> None:
        super().__init__(found)
        self.schedule = schedule
        self.send_model = send_model

    def to_rows(self) -> list[dict[str, Any]]:
        """One row per violation."""
        return [
            {
                "code": each.code,
                "rank": each.rank,
                "step": each.step,
                "action": None if each.action is None else str(each.action),
                "message": each.message,
                "suggestion": each.suggestion,
                "send_models": [str(model) for model in each.send_models],
                "cycle": [_wait_row(wait) for wait in each.cycle],
            }
            for each in self
        ]


def _wait_row(wait: Wait) -> dict[str, Any]:
    awaited = {"rank": wait.for_rank, "step": wait.for_step, "action": str(wait.for_action)}
    own = {"rank": wait.rank, "step": wait.step, "action": str(wait.action)}
    return {**own, "waits_for": awaited, "why": wait.why}


def part_at(table: ActionTable, part: int) -> tuple[int, int, Action]:
    """Rank, step and action of a part."""
    slot = int(table.slot[part])
    rank = int(table.rank[slot])
    (action,) = decode([int(table.code[part]) & ~JOINED], table.graph)
    assert isinstance(action, Action)
    return rank, slot - int(table.slot_bounds[rank]), action


def slot_at(table: ActionTable, slot: int) -> tuple[int, int, Step]:
    """Rank, step and action, or overlapped pair, of a slot."""
    rank = int(table.rank[slot])
    return rank, slot - int(table.slot_bounds[rank]), step_of_slot(table, slot)


def violation_at(table: ActionTable, part: int, code: str, message: str, suggestion: str) -> Violation:
    """A violation at one part."""
    rank, step, action = part_at(table, part)
    return Violation(code, message, suggestion, rank, step, action)


# Violations as text: what, where, why, what to try, and the place marked in the lists.


_CONTEXT_STEPS = 4
_MAX_PER_CODE = 20


def report(schedule: Schedule, violations: Sequence[Violation]) -> str:
    """All of them, each followed by the steps around its place; of many with one code, the first ones."""
    counts = Counter(violation.code for violation in violations)
    shown: Counter[str] = Counter()
    lines: list[str] = []
    for violation in violations:
        shown[violation.code] += 1
        if shown[violation.code] <= _MAX_PER_CODE:
            lines += [str(violation), *_excerpt(schedule, violation)]
        elif shown[violation.code] == counts[violation.code]:
            lines.append(f"error[{violation.code}]: {counts[violation.code] - _MAX_PER_CODE} more of these")
    return "\n".join(lines)


def invalid_schedule_error(schedule: Schedule, violations: Sequence[Violation]) -> ScheduleError:
    """The error to raise for an invalid schedule, with the report of its violations."""
    count = f"{len(violations)} violation{'s' * (len(violations) != 1)}"
    return ScheduleError(f"{printable(schedule.name)} has {count}\n{report(schedule, violations)}")


def _excerpt(schedule: Schedule, violation: Violation) -> list[str]:
    """One line for each rank that is named, the named steps in square brackets."""
    marked: dict[int, set[int]] = {}
    if violation.rank is not None and violation.step is not None:
        marked.setdefault(violation.rank, set()).add(violation.step)
    for wait in violation.cycle:
        marked.setdefault(wait.rank, set()).add(wait.step)
        marked.setdefault(wait.for_rank, set()).add(wait.for_step)
    width = len(str(schedule.num_ranks - 1))
    return [
        f"    rank {rank:>{width}} | {_line(schedule, rank, steps)}" for rank, steps in sorted(marked.items())
    ]


def _line(schedule: Schedule, rank: int, steps: set[int]) -> str:
    first, last = schedule.table.slot_bounds[rank : rank + 2].tolist()
    begin, end = max(min(steps) - _CONTEXT_STEPS, 0), min(max(steps) + _CONTEXT_STEPS + 1, last - first)
    words: list[str] = []
    for step in range(begin, end):
        far = min(abs(step - mark) for mark in steps) > _CONTEXT_STEPS
        text = "..." if far else str(step_of_slot(schedule.table, first + step))
        if not (far and words[-1:] == ["..."]):
            words.append(f"[{text}]" if step in steps else text)
    return " ".join(["..."] * (begin > 0) + words + ["..."] * (end < last - first))
