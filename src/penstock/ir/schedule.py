"""A schedule: which rank does what, in which order. An immutable value.

A `Schedule` that exists is well formed: every step is an action, every stage has a rank. Whether it is also
valid (it can run, and it computes what it should) is decided by `penstock.validate`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from os import PathLike
from typing import Any, TypeAlias

import numpy as np

from penstock.arguments import plural, printable, some, whole_number
from penstock.display import Displayed
from penstock.errors import ActionError, ScheduleError
from penstock.ir.action import MAX_MICROBATCH, Action, Overlap, Step, parse_action
from penstock.ir.encoding import (
    JOINED,
    Bools,
    Ints,
    decode,
    encode,
    kinds_in,
    microbatches_in,
    stages_in,
    texts_of_codes,
)
from penstock.ir.graph import StageGraph
from penstock.ir.kinds import Kind
from penstock.ir.messages import Messages
from penstock.ir.placement import Placement
from penstock.ir.table import ActionTable

# Infer what a list of steps leaves out: the rank of each stage, and the number of microbatches.


def infer_placement(rows: Sequence[Ints]) -> Placement:
    """Put each stage on the rank with most of its actions; one without actions, beside the stage before it."""
    num_ranks, codes = len(rows), _joined(rows)
    if not len(codes):
        raise ScheduleError(
            "there are no actions: a schedule is a list of actions for each rank, such as 0F0 0B0"
        )
    stage = stages_in(codes)
    highest = _highest("stage", rows, stage, np.ones(len(codes), dtype=np.bool_))
    rank = np.repeat(np.arange(num_ranks), [len(row) for row in rows])
    pairs, votes = np.unique(stage * max(num_ranks, 1) + rank, return_counts=True)
    named, host = np.divmod(pairs, max(num_ranks, 1))
    order = np.lexsort((-host, votes, named))  # of each stage, the last has the most votes, and the lowest rank
    hosts = np.full(highest + 1, -1, dtype=np.int64)
    hosts[named[order]] = host[order]
    filled: list[int] = []
    for each in hosts.tolist():
        filled.append(each if each >= 0 else (filled or [0])[-1])
    if idle := sorted(set(range(num_ranks)) - set(filled)):
        raise ScheduleError(
            f"rank {some(idle, 4)}: no stage; every rank must have at least one. A stage is on the rank with "
            "most of its actions, the lowest of several; to see which are on a wrong rank, give the placement"
        )
    return Placement(tuple(filled))


def infer_microbatches(rows: Sequence[Ints]) -> int:
    """One more than the highest number."""
    codes = _joined(rows)
    numbered = np.array([kind.has_microbatch for kind in Kind])[kinds_in(codes)]
    return _highest("microbatch", rows, microbatches_in(codes), numbered) + 1


def _joined(rows: Sequence[Ints]) -> Ints:
    return np.concatenate([np.empty(0, dtype=np.int64), *rows])


def _highest(what: str, rows: Sequence[Ints], number: Ints, named: Bools) -> int:
    """The highest number that is named, if there are enough actions to reach it without gaps."""
    parts = np.flatnonzero(named)
    if not parts.size:
        return 0
    part = int(parts[number[parts].argmax()])
    highest = int(number[part])
    if highest >= parts.size:
        rank = int(np.searchsorted(np.cumsum([len(row) for row in rows]), part, side="right"))
        (action,) = decode([int(_joined(rows)[part]) & ~JOINED])
        raise ScheduleError(
            f"rank {rank}: {action} names {what} {highest}, but {plural(parts.size, 'action')} cannot cover "
            f"{what} 0 to {highest}; {what} numbers have no gaps"
        )
    return highest


_SMALL = 1_000_000  # of stages times microbatches: arrays have an entry for each, so it must be plausible

Rows: TypeAlias = Sequence[str | Iterable[Step | str]]


class Schedule(Displayed):
    """One list of steps per rank.

    `ranks` are the steps of each rank: actions or their texts, or one text with blanks between. What is not
    given is inferred: the rank of a stage is the one that has most of its actions, `microbatches` is one more
    than the highest number, the stage graph is a chain.
    Two schedules are equal when placement, graph, microbatches and steps are; the name is only a label.
    """

    placement: Placement
    graph: StageGraph
    """Which stage feeds which."""
    microbatches: int
    name: str
    table: ActionTable
    """The steps in integers, for hot loops."""

    def __init__(
        self,
        ranks: Rows,
        placement: Placement | None = None,
        microbatches: int | None = None,
        name: str = "custom",
        graph: StageGraph | None = None,
    ) -> None:
        rows = [_steps_of(rank, row) for rank, row in enumerate(ranks)]
        placement = placement or infer_placement(_encoded(rows, None))
        graph = graph or StageGraph.chain(placement.num_stages)
        self._fill(_encoded(rows, graph), placement, microbatches, name, graph)

    @classmethod
    def from_codes(
        cls,
        rows: Sequence[Sequence[int] | Ints],
        placement: Placement | None,
        microbatches: int | None,
        name: str,
        graph: StageGraph | None = None,
    ) -> Schedule:
        """From the integer form of `penstock.ir.encoding`, without making an object for each step."""
        schedule = cls.__new__(cls)
        codes = [np.asarray(row, dtype=np.int64) for row in rows]
        placement = placement or infer_placement(codes)
        chosen = graph or StageGraph.chain(placement.num_stages)
        schedule._fill(codes, placement, microbatches, name, chosen)  # noqa: SLF001 -- our own
        return schedule

    def _fill(
        self, rows: list[Ints], placement: Placement, given: int | None, name: str, graph: StageGraph
    ) -> None:
        given = infer_microbatches(rows) if given is None else given
        if len(rows) != placement.num_ranks:
            raise ScheduleError(
                f"the placement has {plural(placement.num_ranks, 'rank')}, "
                f"but {plural(len(rows), 'list of steps is', 'lists of steps are')} given"
            )
        if graph.num_stages != placement.num_stages:
            raise ScheduleError(
                f"the stage graph has {plural(graph.num_stages, 'stage')}, "
                f"but the placement has {placement.num_stages}"
            )
        microbatches = whole_number(given)
        if microbatches is None or microbatches < 1:
            raise ScheduleError(f"microbatches must be a whole number of at least 1 (given {given!r})")
        num_parts = sum(map(len, rows))
        if placement.num_stages * microbatches > 16 * num_parts + _SMALL:
            raise ScheduleError(
                f"{plural(num_parts, 'action')} cannot cover {plural(placement.num_stages, 'stage')} "
                f"and {plural(microbatches, 'microbatch')}"
            )
        if microbatches > MAX_MICROBATCH + 1:
            raise ScheduleError(f"there are at most {MAX_MICROBATCH + 1} microbatches (given {microbatches})")
        self._set(ActionTable.of(rows, placement, graph, microbatches), name)

    def _set(self, table: ActionTable, name: str) -> None:
        self.__dict__.update(
            placement=table.placement,
            graph=table.graph,
            microbatches=table.microbatches,
            name=name,
            table=table,
        )

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Schedule does not change: cannot set {name!r}; make a new one instead")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a Schedule does not change: cannot delete {name!r}")

    @classmethod
    def parse(
        cls,
        text: str,
        placement: Placement | None = None,
        microbatches: int | None = None,
        name: str = "custom",
        graph: StageGraph | None = None,
    ) -> Schedule:
        """From text: `Schedule.parse("0F0 0B0 | 1F0 1B0")`, ranks separated by `|` or by line breaks."""
        if not isinstance(text, str):
            raise ScheduleError(
                f"Schedule.parse takes a text (given {printable(repr(text))}); a list: Schedule(...)"
            )
        return cls(text.strip().replace("|", "\n").split("\n"), placement, microbatches, name, graph)

    def renamed(self, name: str) -> Schedule:
        """The same schedule under another name."""
        return Schedule.from_codes(self.table.rows, self.placement, self.microbatches, name, self.graph)

    def with_rows(self, rows: Sequence[Sequence[int] | Ints]) -> Schedule:
        """The same placement, graph, microbatches and name with other steps, in integer form."""
        return Schedule.from_codes(rows, self.placement, self.microbatches, self.name, self.graph)

    def with_codes(self, code: Ints, part_bounds: Ints) -> Schedule:
        """The same with other steps: the integer form of all lists, and where each begins in it."""
        schedule = Schedule.__new__(Schedule)
        table = ActionTable.of_code(code, part_bounds, self.placement, self.graph, self.microbatches)
        schedule._set(table, self.name)  # noqa: SLF001 -- our own
        return schedule

    def only(self, kinds: Iterable[Kind]) -> Schedule:
        """The actions of these kinds, in the same order."""
        numbers = [kind.number for kind in kinds]
        return self.with_rows([row[np.isin(kinds_in(row), numbers)] for row in self.table.rows])

    def over(self, graph: StageGraph) -> Schedule:
        """The computation of this schedule, in the same order, over another stage graph.

        Valid if each edge of the graph goes along edges of this one, as from a lower stage of a chain to a
        higher: what skips stages is there even earlier.
        """
        rows = self.only(kind for kind in Kind if kind.is_compute).table.rows
        return Schedule.from_codes(rows, self.placement, self.microbatches, self.name, graph)

    @cached_property
    def ranks(self) -> tuple[tuple[Step, ...], ...]:
        """The steps of each rank."""
        return tuple(tuple(decode(row.tolist(), self.graph)) for row in self.table.rows)

    @cached_property
    def messages(self) -> Messages:
        """The values that have to cross ranks."""
        return Messages.of(self.table)

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
        return len(self.table.rank)

    @property
    def level(self) -> str:
        """`compute` when there are only F, I, W, B and overlapped pairs, else `lowered`."""
        return "compute" if self.table.only_compute else "lowered"

    def write(self, path: str | PathLike[str]) -> None:
        """Write to a `.csv` or `.json` file, atomically."""
        from penstock.formats import write  # noqa: PLC0415 -- a convenience against the import order

        write(self, path)

    def to_rows(self) -> list[dict[str, Any]]:
        """One row per step; an overlapped pair has the stage and microbatch of its forward."""
        return [
            {
                "rank": rank,
                "index": index,
                "action": str(step),
                "kind": str(step.kind),
                "stage": step.parts[0].stage,
                "microbatch": step.parts[0].microbatch,
            }
            for rank, row in enumerate(self.ranks)
            for index, step in enumerate(row)
        ]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        return (
            self.placement == other.placement
            and self.graph == other.graph
            and self.microbatches == other.microbatches
            and self.table.same_steps(other.table)
        )

    def __hash__(self) -> int:
        return hash((self.placement, self.microbatches, self.table.code.tobytes()))

    def __repr__(self) -> str:
        return (
            f"<Schedule {self.name}: {plural(self.num_ranks, 'rank')}, {plural(self.num_stages, 'stage')}, "
            f"{plural(self.microbatches, 'microbatch')}, {plural(self.num_steps, 'step')}, {self.level}>"
        )

    def __str__(self) -> str:
        return "\n".join(" ".join(self.texts(rank)) for rank in range(self.num_ranks))

    def texts_of_slots(self, slots: Ints) -> list[str]:
        """The texts of the steps with these numbers through all ranks; an empty text for -1."""
        table, there = self.table, slots[slots >= 0]
        parts = there
        if table.has_pairs:
            first, last = (np.searchsorted(table.slot, there, side=side) for side in ("left", "right"))
            counts = last - first
            parts = np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        texts = iter(texts_of_codes(table.code[parts], self.graph))
        return [next(texts) if slot >= 0 else "" for slot in slots.tolist()]

    def texts(self, rank: int) -> list[str]:
        """The text of each step of a rank, without making objects of them."""
        return texts_of_codes(self.table.rows[rank], self.graph)


def require_schedule(value: object) -> None:
    """Raise unless the value is a schedule."""
    if not isinstance(value, Schedule):
        raise ScheduleError(
            f"schedule must be a Schedule (given {printable(repr(value))}): penstock.read(path) reads a file, "
            "penstock.build(name, ranks=..., microbatches=...) builds a family"
        )


def _encoded(rows: list[list[Step]], graph: StageGraph | None) -> list[Ints]:
    return [np.fromiter(encode(row, graph), dtype=np.int64) for row in rows]


def _steps_of(rank: int, row: str | Iterable[Step | str]) -> list[Step]:
    return [_as_step(rank, k, step) for k, step in enumerate(row.split() if isinstance(row, str) else row)]


def _as_step(rank: int, index: int, step: object) -> Step:
    if isinstance(step, str):
        try:
            return parse_action(step)
        except ActionError as error:
            raise error.at(f"rank {rank}, step {index}") from None
    if isinstance(step, Action | Overlap):
        return step
    raise ScheduleError(
        f"rank {rank}, step {index}: a step is an action, a pair of them or the text of one (given {step!r})"
    )
