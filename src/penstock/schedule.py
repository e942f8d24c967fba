"""A schedule: which rank does what, in which order. An immutable value.

A `Schedule` that exists is well formed: every step is an action, every stage has a rank. Whether it is
also right, that is whether it can run and computes what it should, is what `penstock.validate` says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from os import PathLike
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from penstock.action import Action, Step, decode, encode, parse_action
from penstock.columns import Columns
from penstock.errors import ScheduleError
from penstock.placement import Placement

if TYPE_CHECKING:
    from penstock.columns import Ints

__all__ = ["Schedule"]

_SMALL = 1_000_000  # of stages times microbatches: memory is set aside for each, so it must be believable

Rows: TypeAlias = Sequence[Iterable[Step | str]]


class Schedule:
    """One list of steps per rank.

    `ranks` are the steps of each rank, as actions or as their texts. What is not given is inferred: the
    rank of a stage is the one that works on it most, `microbatches` is one more than the highest number.
    Two schedules are equal when placement, microbatches and steps are; the name is only a label.
    """

    placement: Placement
    microbatches: int
    name: str
    columns: Columns
    """The steps in integers, for hot loops."""

    def __init__(
        self,
        ranks: Rows,
        placement: Placement | None = None,
        microbatches: int | None = None,
        name: str = "custom",
    ) -> None:
        rows = [[parse_action(s) if isinstance(s, str) else s for s in row] for row in ranks]
        parts = [(rank, part) for rank, row in enumerate(rows) for step in row for part in step.parts]
        if placement is None:
            placement = _infer_placement(parts, len(rows))
        if microbatches is None:
            microbatches = _infer_microbatches(part for _, part in parts)
        codes = [np.fromiter(encode(row), dtype=np.int64) for row in rows]
        self._fill(codes, placement, microbatches, name)

    @classmethod
    def from_codes(
        cls, rows: Sequence[Sequence[int] | Ints], placement: Placement, microbatches: int, name: str
    ) -> Schedule:
        """From the integer form of `penstock.action`, without making an object for each step."""
        schedule = cls.__new__(cls)
        codes = [np.asarray(row, dtype=np.int64) for row in rows]
        schedule._fill(codes, placement, microbatches, name)  # noqa: SLF001 -- our own
        return schedule

    def _fill(self, rows: list[Ints], placement: Placement, microbatches: int, name: str) -> None:
        if len(rows) != placement.num_ranks:
            raise ScheduleError(
                f"the placement has {placement.num_ranks} ranks, but {len(rows)} lists of steps are given"
            )
        if microbatches < 1:
            raise ScheduleError(f"a schedule needs at least 1 microbatch (given {microbatches})")
        num_parts = sum(map(len, rows))
        if placement.num_stages * microbatches > 16 * num_parts + _SMALL:
            raise ScheduleError(
                f"{num_parts} actions cannot cover {placement.num_stages} stages "
                f"and {microbatches} microbatches"
            )
        columns = Columns.of(rows, placement, microbatches)
        self.__dict__.update(placement=placement, microbatches=microbatches, name=name, columns=columns)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Schedule does not change: cannot set {name!r}; make a new one instead")

    @classmethod
    def parse(
        cls,
        text: str,
        placement: Placement | None = None,
        microbatches: int | None = None,
        name: str = "custom",
    ) -> Schedule:
        """From text: `Schedule.parse("0F0 0B0 | 1F0 1B0")`, ranks parted by `|` or by line breaks."""
        rows = [row.split() for row in text.strip().replace("|", "\n").split("\n")]
        return cls(rows, placement, microbatches, name)

    def renamed(self, name: str) -> Schedule:
        """The same schedule under another name."""
        return Schedule.from_codes(self.columns.rows, self.placement, self.microbatches, name)

    def with_rows(self, rows: Sequence[Sequence[int] | Ints]) -> Schedule:
        """The same placement, microbatches and name with other steps, in integer form."""
        return Schedule.from_codes(rows, self.placement, self.microbatches, self.name)

    @cached_property
    def ranks(self) -> tuple[tuple[Step, ...], ...]:
        """The steps of each rank."""
        return tuple(tuple(decode(row.tolist())) for row in self.columns.rows)

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return self.placement.num_ranks

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return self.placement.num_stages

    @property
    def num_steps(self) -> int:
        """How many steps all ranks take together; an overlapped pair is one."""
        return len(self.columns.rank)

    @property
    def level(self) -> str:
        """`compute` when there are only F, I, W, B and overlapped pairs, else `lowered`."""
        return "compute" if self.columns.only_compute else "lowered"

    def write(self, path: str | PathLike[str]) -> None:
        """Write to a `.csv` or `.json` file, whole or not at all."""
        from penstock.formats import write  # noqa: PLC0415 -- a convenience that points against the walk

        write(self, path)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        return (
            self.placement == other.placement
            and self.microbatches == other.microbatches
            and self.columns.same_steps(other.columns)
        )

    def __hash__(self) -> int:
        return hash((self.placement, self.microbatches, self.columns.code.tobytes()))

    def __repr__(self) -> str:
        return (
            f"<Schedule {self.name}: {self.num_ranks} ranks, {self.num_stages} stages, "
            f"{self.microbatches} microbatches, {self.num_steps} steps, {self.level}>"
        )

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, row)) for row in self.ranks)


def _infer_placement(parts: Sequence[tuple[int, Action]], num_ranks: int) -> Placement:
    """Put each stage on the rank that works on it most; one that nobody works on, beside the one before it."""
    counts = Counter((part.stage, rank) for rank, part in parts)
    highest = max((stage for stage, _ in counts), default=0)
    if highest >= max(len(parts), 1):
        raise ScheduleError(
            f"stage {highest} is named, but {len(parts)} actions cannot cover stages 0 to {highest}: "
            "stages are numbered from 0 without holes"
        )
    votes: list[Counter[int]] = [Counter() for _ in range(highest + 1)]
    for (stage, rank), count in counts.items():
        votes[stage][rank] = count
    hosts: list[int] = []
    for vote in votes:
        hosts.append(max(vote, key=lambda rank: (vote[rank], -rank)) if vote else (hosts or [0])[-1])
    if idle := sorted(set(range(num_ranks)) - set(hosts)):
        raise ScheduleError(f"ranks {idle} have no stage of their own: every rank must work on one")
    return Placement(tuple(hosts))


def _infer_microbatches(parts: Iterable[Action]) -> int:
    numbers = [part.microbatch for part in parts if part.microbatch is not None]
    if max(numbers, default=0) >= max(len(numbers), 1):
        raise ScheduleError(
            f"microbatch {max(numbers)} is named, but {len(numbers)} actions cannot cover "
            f"microbatches 0 to {max(numbers)}: they are numbered from 0 without holes"
        )
    return max(numbers, default=0) + 1
