"""Add UNSHARD, RESHARD and REDUCE_GRAD by simulation, for the shortest makespan within a memory limit per rank.

    look-aheads   `AddSharding(k)` for every k: what the result is compared with
    plans         `plan_rank` for every rank, with gathers given more or less time ahead of their use
    mixtures      the best plan, with another plan for one rank, or with its reductions after its gathers

Each is simulated. One that exceeds the limit while it runs, because a RESHARD waits behind another collective,
is planned again with fewer free bytes in the steps concerned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import ClassVar

import numpy as np

from penstock.arguments import some
from penstock.cost.costs import Costs
from penstock.cost.memory import Memory, exceeds, memory_over_time
from penstock.errors import SearchError
from penstock.ir.encoding import Bools, Floats, Ints
from penstock.ir.kinds import Kind
from penstock.ir.schedule import Schedule
from penstock.ir.table import ActionTable
from penstock.lowering import AddGradReduction, AddSharding, Pass
from penstock.lowering.passes import require_absent
from penstock.lowering.sharding import last_backwards, with_reductions, with_sharding
from penstock.search.request import check_memory_limit, rounded
from penstock.simulation.simulator import Simulator, simulate
from penstock.simulation.timeline import Timeline
from penstock.validation import SendModel

# Which stages of a rank are unsharded during which of its steps, within the bytes that each step leaves free.
#
# A stage stays unsharded from one use to the next where there is room. Where there is not, the stage whose next
# use is farthest is resharded, as in Belady's rule, which gathers least if all stages have the same size, and
# gathered again in time for that use. What is left of the room is used to start gathers earlier, in the order
# of the steps that need them.
#
#     step     0F0  0F1  1F0  1F1  2F0  2F1  2B0 ...        room for two stages
#     stage 0   #    #    #    #    .    .    .              its next use is farthest: resharded for stage 2
#     stage 1   o    o    #    #    #    #    #              o: gathered ahead
#     stage 2   .    .    o    o    #    #    #              never before there is room


@dataclass(frozen=True, eq=False)
class RankSteps:
    """The compute steps of a rank, without collectives; stages are numbered within the rank."""

    used: Bools
    """Per stage and step: whether the step computes on the stage."""
    start: Floats
    end: Floats
    size: Sequence[float]
    """Per stage: its unsharded bytes."""
    gather: Sequence[float]
    """Per stage: seconds of its UNSHARD."""


@dataclass
class _Hold:
    """A stage is unsharded from step `start` until it is used in step `use`."""

    stage: int
    use: int
    earliest: int
    """The step after its use before that; 0 for the first."""
    latest: int
    """The step before which a gather is started in time."""
    start: int


def plan_rank(rank: RankSteps, free: Floats, lead: float) -> Bools:
    """Per stage and step: whether it is unsharded, with so many `free` bytes at each step.

    A gather is given `lead` times its seconds before the use, where there is room, at the expense of stages
    that are used later. The stages that a step uses are unsharded even where they do not fit.
    """
    holds = _holds(rank, lead)
    _evict(rank, free, holds)
    held = rank.used.copy()
    for hold in holds:
        held[hold.stage, hold.start : hold.use] = True
    left = free - np.array(rank.size) @ held
    _gather_ahead(rank, left, holds, held)
    return held


def _holds(rank: RankSteps, lead: float) -> list[_Hold]:
    """One for each use that does not directly follow another, in the order of the uses; all gaps are kept."""
    found = []
    for stage, used in enumerate(rank.used):
        before = -1
        for use in np.flatnonzero(used).tolist():
            if use > before + 1 or before < 0:
                in_time = rank.start[use] - lead * rank.gather[stage]
                latest = min(use, int(np.searchsorted(rank.end[:use], in_time, side="right")))
                latest = max(latest, before + 1)
                found.append(_Hold(stage, use, before + 1, latest, before + 1 if before >= 0 else latest))
            before = use
    return sorted(found, key=lambda hold: hold.use)


def _evict(rank: RankSteps, free: Floats, holds: list[_Hold]) -> None:
    """Start holds later, those with the farthest use first, until every step has room."""
    total = np.array(rank.size) @ rank.used
    by_start = sorted(holds, key=lambda hold: -hold.start)
    active: list[_Hold] = []
    for step in range(rank.used.shape[1]):
        while by_start and by_start[-1].start <= step:
            active.append(by_start.pop())
        active = [hold for hold in active if hold.use > step]
        excess = float(total[step]) + sum(rank.size[hold.stage] for hold in active) - float(free[step])
        for hold in sorted(active, key=lambda hold: -hold.use):
            if excess <= 0:
                break
            if rank.size[hold.stage] > 0:
                excess -= rank.size[hold.stage]
                active.remove(hold)
                hold.start = max(hold.latest, step + 1)
                if hold.start < hold.use:
                    by_start.append(hold)
                    by_start.sort(key=lambda each: -each.start)


def _gather_ahead(rank: RankSteps, left: Floats, holds: list[_Hold], held: Bools) -> None:
    """Start gathers as early as there is room, none before one that is needed sooner."""
    earliest = 0
    for hold in holds:
        if hold.start == hold.earliest and hold.earliest > 0:
            continue  # not gathered: kept since its last use
        size = rank.size[hold.stage]
        while hold.start > max(hold.earliest, earliest) and left[hold.start - 1] >= size:
            hold.start -= 1
            left[hold.start] -= size
            held[hold.stage, hold.start] = True
        earliest = max(earliest, hold.start)


_COLLECTIVES = tuple(kind for kind in Kind if kind.is_collective)
_LEADS = (0.0, 1.0, 2.0, 4.0)  # in times of the gather's seconds
_REPAIRS = 8
_MIXTURES, _SIMULATED_STEPS = 64, 400_000  # of all mixtures together


@dataclass(frozen=True)
class PlaceSharding(Pass):
    """UNSHARD, RESHARD and REDUCE_GRAD for the shortest makespan, and the fewest gathers among the shortest.

    No rank holds more than `memory_limit` bytes. The result is never slower than the fastest look-ahead
    (`AddSharding(k)` for any k) within the limit, and never gathers more often than that one does.
    """

    costs: Costs = field(default_factory=Costs)
    memory_limit: float | None = None
    """Bytes per rank, parameters, gradients and optimizer state included."""
    send_model: SendModel = SendModel.BUFFERED
    name: ClassVar[str] = "place-sharding"

    def __post_init__(self) -> None:
        if self.memory_limit is not None:
            check_memory_limit(self.memory_limit)

    def __call__(self, schedule: Schedule) -> Schedule:
        """The schedule with its collectives."""
        require_absent(schedule, self.name, *_COLLECTIVES)
        return _Placement(schedule, self).best().schedule


@dataclass(frozen=True)
class _RankChoice:
    """How one rank is planned."""

    lead: float
    reduces_last: bool = False
    """Whether its reductions wait until all its gathers are started."""


@dataclass(frozen=True, eq=False)
class _Placed:
    """A schedule with collectives, and its simulation."""

    timeline: Timeline

    @property
    def schedule(self) -> Schedule:
        return self.timeline.schedule

    @cached_property
    def score(self) -> tuple[float, int]:
        """The makespan without the noise of its last digits, and the number of gathers."""
        return rounded(self.timeline.makespan), int(self.schedule.table.of_kind(Kind.UNSHARD).sum())


class _Placement:
    """One schedule, its costs and its limit."""

    def __init__(self, schedule: Schedule, options: PlaceSharding) -> None:
        self._schedule, self._options = schedule, options
        self._limit = inf if options.memory_limit is None else float(options.memory_limit)
        self._base = simulate(schedule, options.costs, send_model=options.send_model)
        table = schedule.table
        self._slots = [_compute_slots(table, rank) for rank in range(schedule.num_ranks)]
        """Per rank: the slots of its compute steps."""
        self._steps = [self._rank_steps(rank) for rank in range(schedule.num_ranks)]
        free = self._free_bytes()
        self._free = {lead: [each.copy() for each in free] for lead in _LEADS}
        """Per lead, rank and step: bytes that the plan may use for unsharded parameters."""
        self._plans: dict[tuple[int, float], Bools] = {}

    def _rank_steps(self, rank: int) -> RankSteps:
        table, costs, slots = self._schedule.table, self._options.costs, self._slots[rank]
        stages = np.array(table.placement.stages_of_rank[rank])
        parts = np.arange(*table.part_bounds[rank : rank + 2])
        parts = parts[table.is_compute[parts]]
        used = np.zeros((len(stages), len(slots)), dtype=np.bool_)
        used[np.searchsorted(stages, table.stage[parts]), np.searchsorted(slots, table.slot[parts])] = True
        size, gather = (
            np.array(costs.per_stage(name, table.placement.num_stages))[stages].tolist()
            for name in ("unsharded_parameters", "unshard")
        )
        return RankSteps(used, self._base.start[slots], self._base.end[slots], size, gather)

    def _free_bytes(self) -> list[Floats]:
        """Per rank and step: bytes that are left for unsharded parameters, by the order of the steps."""
        schedule = self._schedule
        clock = np.arange(schedule.num_steps, dtype=np.float64) * 2
        memory = memory_over_time(schedule.table, schedule.messages, self._options.costs, clock, clock + 1)
        return [self._limit - _peaks(each, clock[slots] + 1) for each, slots in zip(memory, self._slots)]

    # --- candidates --------------------------------------------------------------------------------

    def best(self) -> _Placed:
        """The shortest within the limit, and of these the one with the fewest gathers."""
        fixed = list(self._look_aheads())
        reference = min((each for each in fixed if self._fits(each)), key=lambda each: each.score, default=None)
        most = inf if reference is None else reference.score[1]
        planned = [found for lead in _LEADS if (found := self._planned(lead)) is not None]
        improved = self._mixed(*min(planned, key=lambda found: found[1].score)) if planned else None
        plans = [found[1] for found in planned] + ([] if improved is None else [improved])
        allowed = [each for each in plans if each.score[1] <= most]
        if reference is None and not allowed:
            raise self._does_not_fit(fixed[0])
        return min(([] if reference is None else [reference]) + allowed, key=lambda each: each.score)

    def _look_aheads(self) -> Iterator[_Placed]:
        most = max(map(len, self._schedule.placement.stages_of_rank))
        for count in range(1, most + 1):
            yield self._timed(AddGradReduction()(AddSharding(count)(self._schedule)))

    def _planned(self, lead: float) -> tuple[list[_RankChoice], _Placed] | None:
        """All ranks planned with this lead, with fewer free bytes where the simulation exceeds the limit."""
        choices = [_RankChoice(lead)] * self._schedule.num_ranks
        for repair in range(_REPAIRS + 1):
            placed = self._built(choices)
            over = [rank for rank, peak in enumerate(placed.timeline.peak_memory) if exceeds(peak, self._limit)]
            if not over:
                return choices, placed
            for rank in over:
                self._shrink(self._free[lead][rank], placed, rank, tightest=repair == _REPAIRS - 1)
                del self._plans[rank, lead]
        return None

    def _shrink(self, free: Floats, placed: _Placed, rank: int, *, tightest: bool) -> None:
        slots = _compute_slots(placed.schedule.table, rank)
        excess = _peaks(placed.timeline.memory[rank], placed.timeline.end[slots]) - self._limit
        free -= np.maximum(excess, 0)
        if tightest or not (excess > 0).any():
            free[:] = 0

    def _mixed(self, choices: list[_RankChoice], best: _Placed) -> _Placed:
        """Change the plan of one rank after the other as long as that is better."""
        left = min(_MIXTURES, _SIMULATED_STEPS // self._schedule.num_steps)
        options = [_RankChoice(lead, last) for last in (False, True) for lead in _LEADS]
        for rank in range(len(choices)):
            for option in options:
                if left == 0 or self._same(rank, option, choices[rank]):
                    continue
                changed = [*choices[:rank], option, *choices[rank + 1 :]]
                left -= 1
                placed = self._built(changed)
                if self._fits(placed) and placed.score < best.score:
                    choices, best = changed, placed
        return best

    def _same(self, rank: int, choice: _RankChoice, other: _RankChoice) -> bool:
        """Whether two choices produce the same list."""
        return choice.reduces_last == other.reduces_last and bool(
            np.array_equal(self._held(rank, choice.lead), self._held(rank, other.lead))
        )

    def _held(self, rank: int, lead: float) -> Bools:
        if (rank, lead) not in self._plans:
            self._plans[rank, lead] = plan_rank(self._steps[rank], self._free[lead][rank], lead)
        return self._plans[rank, lead]

    # --- schedules ---------------------------------------------------------------------------------

    def _built(self, choices: Sequence[_RankChoice]) -> _Placed:
        """The schedule of these plans, simulated."""
        held = [self._held(rank, choice.lead) for rank, choice in enumerate(choices)]
        after = last_backwards(self._schedule.table)
        for rank, choice in enumerate(choices):
            if choice.reduces_last:
                last = np.flatnonzero((held[rank][:, 1:] > held[rank][:, :-1]).any(axis=0))[-1:] + 1
                own = np.array(self._schedule.placement.stages_of_rank[rank])
                own = own[after[own] >= 0]
                after[own] = np.maximum(after[own], (self._slots[rank][last] - 1).max(initial=-1))
        reduced = with_reductions(self._schedule, after)
        return self._timed(with_sharding(reduced, lambda rank, _: _per_slot(reduced, rank, held[rank])))

    def _timed(self, schedule: Schedule) -> _Placed:
        simulator = Simulator(schedule, self._options.costs, self._options.send_model)
        return _Placed(Timeline(schedule, simulator.costs, *simulator.times(simulator.finished_run())))

    # --- the limit ---------------------------------------------------------------------------------

    def _fits(self, placed: _Placed) -> bool:
        return not exceeds(max(placed.timeline.peak_memory), self._limit)

    def _does_not_fit(self, tightest: _Placed) -> SearchError:
        peaks, units = enumerate(tightest.timeline.peak_memory), self._options.costs.units
        over = [f"rank {rank} needs {units.memory(peak)}" for rank, peak in peaks if exceeds(peak, self._limit)]
        return SearchError(
            "no placement of UNSHARD and RESHARD fits the memory limit of "
            f"{units.memory(self._limit)} per rank: {some(over, 4, '; ')}, even if only the "
            "stage in use is unsharded; raise the limit, or choose a schedule that holds fewer activations"
        )


def _compute_slots(table: ActionTable, rank: int) -> Ints:
    first, last = table.part_bounds[rank : rank + 2]
    return np.unique(table.slot[first:last][table.is_compute[first:last]])


def _peaks(memory: Memory, ends: Floats) -> Floats:
    """Per step: the most bytes held between the end of the step before it and its own end."""
    begins = np.concatenate(([-inf], ends[:-1]))
    first = np.searchsorted(memory.times, begins, side="right").tolist()
    last = np.searchsorted(memory.times, ends, side="left").tolist()
    levels = np.concatenate(([memory.fixed], memory.total))  # levels[i] is held before the i-th change
    return np.array([levels[i : max(i, j) + 1].max() for i, j in zip(first, last)])


def _per_slot(schedule: Schedule, rank: int, held: Bools) -> Bools:
    """Per stage and slot of a rank: what is held in the compute step at or after the slot."""
    table = schedule.table
    first, last = table.slot_bounds[rank : rank + 2]
    computes = table.is_compute_slot[first:last].astype(np.int64)
    index = np.cumsum(computes) - computes
    ended = np.hstack((held, np.zeros((len(held), 1), dtype=np.bool_)))
    return ended[:, index]
