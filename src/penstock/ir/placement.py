"""Which rank hosts which stage.

loop, 4 ranks, 2 per rank       V, 4 ranks, 2 legs          loop, [1, 2, 2, 1] per rank       custom
rank 0:  0  4                   rank 0:  0  7               rank 0:  0                         rank 0:  0  1  4
rank 1:  1  5                   rank 1:  1  6               rank 1:  1  3                      rank 1:  2  3
rank 2:  2  6                   rank 2:  2  5               rank 2:  2  4
rank 3:  3  7                   rank 3:  3  4               rank 3:     5
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from penstock.arguments import plural, printable, whole_number
from penstock.errors import Message, Parameter, PlacementError
from penstock.ir.action import MAX_STAGE

MAX_STAGES = MAX_STAGE + 1
"""The largest number of stages."""

StagesPerRank = int | Sequence[int]
"""One number for all ranks, or a list of one for each."""


@dataclass(frozen=True)
class Placement:
    """The rank of every stage: `Placement((0, 1, 1, 0))` puts stages 0 and 3 on rank 0."""

    stage_to_rank: tuple[int, ...]

    def __post_init__(self) -> None:
        given = tuple(self.stage_to_rank)
        hosts = tuple(rank for rank in map(whole_number, given) if rank is not None)
        if len(hosts) != len(given):
            raise PlacementError(f"ranks are whole numbers (given {printable(repr(given))})")
        object.__setattr__(self, "stage_to_rank", hosts)
        if not self.stage_to_rank:
            raise PlacementError("a placement needs at least one stage")
        if len(hosts) > MAX_STAGES:
            raise PlacementError(f"there are at most {MAX_STAGES} stages (given {len(hosts)})")
        if negative := [s for s, rank in enumerate(self.stage_to_rank) if rank < 0]:
            raise PlacementError(f"ranks are numbered from 0: stages {negative[:4]} have a negative rank")
        used = set(self.stage_to_rank)
        if len(used) <= max(used):
            # name a few only: a single huge rank number must not make a huge message
            idle = sorted(set(range(min(max(used), len(used) + 4))) - used)
            raise PlacementError(
                f"every rank must host a stage, but ranks {_some(idle)} of 0..{max(used)} host none"
            )

    @classmethod
    def loop(cls, ranks: int, stages_per_rank: StagesPerRank = 1) -> Placement:
        """Stage s on rank s mod `ranks`: after the last rank the chain starts over at rank 0.

        With a list of one number for each rank, the chain skips ranks: see `kept_stages`.
        """
        most = _checked_most(ranks, stages_per_rank, "stages_per_rank")
        return cls(tuple(range(ranks)) * most).with_stages_per_rank(stages_per_rank)

    @classmethod
    def v(cls, ranks: int, legs: StagesPerRank = 2) -> Placement:
        """Down the ranks, and back up, and down again, `legs` times: neighbours at a turn share a rank.

        With a list of one number for each rank, the chain skips ranks: see `kept_stages`.
        """
        most = _checked_most(ranks, legs, "legs")
        down = tuple(range(ranks))
        every = tuple(rank for leg in range(most) for rank in (down[::-1] if leg % 2 else down))
        return cls(every).with_stages_per_rank(legs)

    @classmethod
    def custom(cls, stages_of_rank: Mapping[int, Iterable[int]] | Sequence[Iterable[int]]) -> Placement:
        """From the stages of each rank: `Placement.custom({0: [0, 1, 4], 1: [2, 3]})`."""
        items = stages_of_rank.items() if isinstance(stages_of_rank, Mapping) else enumerate(stages_of_rank)
        hosts: dict[int, list[int]] = {}
        problems: list[str] = []
        for rank, stages in items:
            hosted = list(stages)
            if not hosted:
                problems.append(f"rank {rank} hosts no stage")
            for stage in hosted:
                hosts.setdefault(stage, []).append(rank)
        problems += [f"stage {s} is on ranks {r}" for s, r in sorted(hosts.items()) if len(r) > 1]
        if negative := sorted(stage for stage in hosts if stage < 0):
            problems.append(f"stages are numbered from 0 (given {_some(negative)})")
        if holes := sorted(set(range(len(hosts))) - set(hosts)):
            problems.append(f"stages are numbered from 0 without holes, but {_some(holes)} are on no rank")
        if problems:
            raise PlacementError("; ".join(problems))
        return cls(tuple(hosts[stage][0] for stage in range(len(hosts))))

    def kept_stages(self, counts: Sequence[int]) -> tuple[int, ...]:
        """The stages that remain if rank r has only `counts[r]` of its stages.

        Ranks in the first half keep their first stages and the others their last ones, so that the chain begins
        on the first rank and, in a loop, ends on the last.
        """
        kept: list[int] = []
        for rank, (own, count) in enumerate(zip(self.stages_of_rank, counts)):
            kept += own[:count] if 2 * rank < self.num_ranks else own[len(own) - count :]
        return tuple(sorted(kept))

    def with_stages_per_rank(self, stages_per_rank: StagesPerRank) -> Placement:
        """The placement of the kept stages if there is a list of one number for each rank, else this one."""
        if not isinstance(stages_per_rank, Sequence):
            return self
        return Placement(tuple(self.stage_to_rank[stage] for stage in self.kept_stages(stages_per_rank)))

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.stage_to_rank)

    @cached_property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return max(self.stage_to_rank) + 1

    @cached_property
    def stages_of_rank(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank, in ascending order."""
        stages: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for stage, rank in enumerate(self.stage_to_rank):
            stages[rank].append(stage)
        return tuple(map(tuple, stages))

    @cached_property
    def style(self) -> str:
        """`loop`, `v` or `custom`: the shape of this mapping, however it was created."""
        legs, rest = divmod(self.num_stages, self.num_ranks)
        if not rest and self == Placement.loop(self.num_ranks, legs):
            return "loop"
        return "v" if not rest and self == Placement.v(self.num_ranks, legs) else "custom"


def most_stages(stages_per_rank: StagesPerRank) -> int:
    """The largest number of stages of a rank; 0 if a list has none."""
    if not isinstance(stages_per_rank, Sequence):
        return stages_per_rank
    return max((number for each in stages_per_rank if (number := whole_number(each))), default=0)


def problems_of_counts(
    ranks: int, stages_per_rank: StagesPerRank, name: str = "stages_per_rank"
) -> list[Message]:
    """List what is wrong with a list of stages per rank, which is given as the argument `name`."""
    if not isinstance(stages_per_rank, Sequence):
        return []
    given = printable(repr(stages_per_rank))
    if any((whole_number(count) or 0) < 1 for count in stages_per_rank):
        rule = f" must be a whole number of at least 1 (given {given})"
        return [Message("every number in ", Parameter(name), rule)]
    if len(stages_per_rank) != ranks:
        counts = f"{plural(len(stages_per_rank), 'number')} for {plural(ranks, 'rank')}"
        return [Message(Parameter(name), f" has {counts} (given {given}): give one for each")]
    return []


def _checked_most(ranks: int, stages_per_rank: StagesPerRank, name: str) -> int:
    if problems := problems_of_counts(ranks, stages_per_rank, name):
        raise PlacementError(*problems)
    most = most_stages(stages_per_rank)
    counts = {"ranks": ranks, name: most}
    if below := [f"{what} must be at least 1 (given {n})" for what, n in counts.items() if n < 1]:
        raise PlacementError("; ".join(below))
    if ranks * most > MAX_STAGES:
        raise PlacementError(f"there are at most {MAX_STAGES} stages (given ranks {ranks} and {name} {most})")
    return most


def _some(numbers: Sequence[int]) -> str:
    """The first numbers; there may be too many to count the rest."""
    return ", ".join(map(str, numbers[:4])) + (", ..." if len(numbers) > 4 else "")
