"""Violations as text: what, where, why, what to try, and the place marked in the lists."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from penstock.arguments import printable
from penstock.errors import ScheduleError
from penstock.ir.schedule import Schedule
from penstock.validation.violation import Violation, slot_at

__all__ = ["invalid_schedule_error", "report"]

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
        text = "..." if far else str(slot_at(schedule.table, first + step)[2])
        if not (far and words[-1:] == ["..."]):
            words.append(f"[{text}]" if step in steps else text)
    return " ".join(["..."] * (begin > 0) + words + ["..."] * (end < last - first))
