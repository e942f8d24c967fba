"""Recognition: which family's order a schedule has, or the nearest family and where it first differs.

Only the order of F, I, W and B counts: messages, sharding and memory policies are left out, and a B is the
same as an I that is directly followed by its W. So a schedule is recognized before and after lowering, and
after its backwards are split or merged. For few microbatches several families have the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from penstock.arguments import plural
from penstock.errors import BuildError
from penstock.families import Family, build, families
from penstock.ir.encoding import Ints
from penstock.ir.kinds import PASS_KINDS, Kind
from penstock.ir.schedule import Schedule
from penstock.lowering import SplitBackward


@dataclass(frozen=True)
class Difference:
    """The first position at which a schedule differs from a family, by step number of the schedule."""

    rank: int
    step: int
    found: str
    """The text of the schedule's step; empty if its list has ended."""
    expected: str
    """The text of the family's step; empty if its list has ended."""

    def __str__(self) -> str:
        found, expected = (text or "the end" for text in (self.found, self.expected))
        return f"rank {self.rank}, step {self.step}: {found} instead of {expected}"


@dataclass(frozen=True)
class Recognition:
    """The families with the order of a schedule, or the nearest family if there is none."""

    families: tuple[str, ...]
    """All families with this order."""
    sizes: str
    groups: Mapping[str, int] = field(default_factory=dict)
    """The microbatch groups of those of the families, or of the nearest, that have not the default group."""
    nearest: str | None = None
    """The family that differs in the fewest actions; None if no family has this placement."""
    differing: int = 0
    """How many actions differ from the nearest family."""
    actions: int = 0
    first: Difference | None = None

    def __str__(self) -> str:
        if self.families:
            first, *others = map(self._named, self.families)
            return f"{first} ({self.sizes})" + (f", the same as {', '.join(others)}" if others else "")
        if self.nearest is None or self.first is None:
            return f"no known family has this placement ({self.sizes})"
        share = f"{self.differing} of {plural(self.actions, 'action')} differ"
        nearest = f"{self._named(self.nearest)} ({self.sizes})"
        return f"no known family; nearest is {nearest}: {share}, first at {self.first}"

    def _named(self, family: str) -> str:
        return f"{family} group={self.groups[family]}" if family in self.groups else family


def recognize(schedule: Schedule) -> Recognition:
    """Compare the order of a schedule with that of every family of the same sizes and placement."""
    rows = _normal_form(schedule)
    counts = _stages_per_rank(schedule)
    stages = ",".join(map(str, [counts] if isinstance(counts, int) else counts))
    sizes = f"p={schedule.num_ranks}, v={stages}, m={schedule.microbatches}"
    actions = sum(map(len, rows))
    equal: dict[str, int | None] = {}
    nearest: tuple[int, str, int | None, Schedule] | None = None
    for name, group, built in _candidates(schedule.only(PASS_KINDS)):
        differing = sum(map(_differing, rows, _normal_form(built)))
        if not differing:
            equal.setdefault(name, group)
        elif nearest is None or differing < nearest[0]:
            nearest = differing, name, group, built
    if equal:
        groups = {name: group for name, group in equal.items() if group is not None}
        return Recognition(tuple(equal), sizes, groups, actions=actions)
    if nearest is None:
        return Recognition((), sizes, actions=actions)
    differing, name, group, built = nearest
    first = _first_difference(rows, schedule, built)
    groups = {} if group is None else {name: group}
    return Recognition((), sizes, groups, name, min(differing, actions), actions, first)


def _stages_per_rank(schedule: Schedule) -> int | list[int]:
    counts = [len(own) for own in schedule.placement.stages_of_rank]
    return counts[0] if len(set(counts)) == 1 else counts


def _normal_form(schedule: Schedule) -> list[Ints]:
    return list(SplitBackward()(schedule.only(PASS_KINDS)).table.rows)


def _differing(row: Ints, other: Ints) -> int:
    common = min(len(row), len(other))
    return int((row[:common] != other[:common]).sum()) + max(len(row), len(other)) - common


def _candidates(schedule: Schedule) -> Iterator[tuple[str, int | None, Schedule]]:
    """Yield the families with a schedule of these sizes and placement, and its group if not the default."""
    fixed_first = sorted(families().values(), key=lambda family: family.stages_per_rank is None)
    for family in fixed_first:
        for group in _groups(family, schedule):
            with suppress(BuildError):  # the family has no schedule of these sizes
                built = _built(family, schedule, group)
                if built.placement == schedule.placement:
                    yield family.name, group, built


def _built(family: Family, like: Schedule, group: int | None) -> Schedule:
    """The schedule of a family with the sizes of another."""
    build_it = partial(build, family.name, ranks=like.num_ranks, microbatches=like.microbatches, group=group)
    if not like.graph.is_chain:
        return build_it(graph=like.graph, placement=like.placement)
    return build_it(stages_per_rank=_stages_per_rank(like))


def _groups(family: Family, schedule: Schedule) -> list[int | None]:
    """The default group, and the one that the first forwards of the first rank have."""
    if schedule.num_stages == schedule.num_ranks:  # groups of all sizes are alike
        return [None]
    allowed = family.group_range(schedule.num_ranks, schedule.microbatches)
    stages, forwards = schedule.table.stage, schedule.table.of_kind(Kind.F)
    first = stages[: len(schedule.table.rows[0])]
    same = (first == first[:1]) & forwards[: len(first)]
    run = int(np.argmin(same)) if not same.all() else len(same)
    smallest = allowed[0] if allowed else None
    return [None, run] if run in allowed and run != smallest else [None]


def _first_difference(rows: list[Ints], schedule: Schedule, family: Schedule) -> Difference:
    """The difference with the lowest position in a list, in the steps of both; `rows` are the normal form."""
    found = []
    for rank, (row, other) in enumerate(zip(rows, _normal_form(family))):
        common = min(len(row), len(other))
        differs = np.flatnonzero(row[:common] != other[:common])
        if len(differs) or len(row) != len(other):
            found.append((int(differs[0]) if len(differs) else common, rank))
    position, rank = min(found)
    step, text = _step_at(schedule, rank, position)
    return Difference(rank, step, text, _step_at(family, rank, position)[1])


def _step_at(schedule: Schedule, rank: int, position: int) -> tuple[int, str]:
    """The step that has this position in the normal form, and its text."""
    for number, step in enumerate(schedule.ranks[rank]):
        for part in step.parts:
            position -= {Kind.F: 1, Kind.I: 1, Kind.W: 1, Kind.B: 2}.get(part.kind, 0)
        if position < 0:
            return number, str(step)
    return len(schedule.ranks[rank]), ""
