"""Passes that choose by simulation: `FitMemory` (recompute and offload) and `PlaceSharding` (collectives)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, product, takewhile
from math import inf
from typing import ClassVar

import numpy as np

from penstock.arguments import some
from penstock.cost.costs import Costs
from penstock.cost.memory import Memory, exceeds, live_activations, memory_over_time
from penstock.errors import SearchError
from penstock.ir.encoding import Bools, Floats, Ints, code_of
from penstock.ir.kinds import MEMORY_KINDS, Kind
from penstock.ir.schedule import Schedule
from penstock.ir.table import ActionTable
from penstock.lowering import AddGradReduction, AddSharding, Offload, Pass, Policy, Recompute
from penstock.lowering.passes import require_absent
from penstock.lowering.sharding import with_sharding
from penstock.search.request import check_memory_limit, objective_errors
from penstock.simulation.simulator import Simulator, simulate
from penstock.simulation.timeline import Timeline
from penstock.validation import SendModel


def _score(timeline: Timeline, objective: str, *kinds: Kind) -> tuple[float, int]:
    """The objective without the noise of its last digits, then the number of actions of these kinds."""
    return float(f"{timeline.length(objective):.12g}"), int(timeline.schedule.table.of_kind(*kinds).sum())


# Memory policies: what is recomputed and offloaded so that an order fits a memory limit, in the least time.
#
#     simple     all stages, the stages of ranks that hold too much, or the fewest that are enough: recomputed,
#                offloaded, or both; a plan tries these in every configuration
#     uniform    also every n-th microbatch, or those that live long, and several distances of RELOAD and use
#     single     from the fastest that fits, single microbatches of a stage are left out while the rest fits and
#                is no slower
#
# Every candidate is simulated. The order of the other actions stays as it is; `driver` changes it too.

_EVERY, _LONGER, _AHEAD, _SIMPLY_AHEAD = (1, 2, 3), (1, 2, 4, 8, 16), (0, 1, 2, 4), (0, 1, 2)
_SIMULATED_STEPS = 400_000  # of all attempts to leave one out together, and five times as many of policies
_FEWEST_POLICIES = 24


@dataclass(frozen=True)
class FitMemory(Pass):
    """RECOMPUTE, OFFLOAD and RELOAD such that no rank holds more than the limit, in the shortest time found.

    The result is never slower than the fastest policy that fits. A schedule that fits stays as it is.
    """

    memory_limit: float
    """Bytes per rank, parameters, gradients and optimizer state included."""
    costs: Costs = field(default_factory=Costs)
    recompute: bool = True
    offload: bool = True
    send_model: SendModel = SendModel.BUFFERED
    objective: str = "makespan"
    """What to minimize: `makespan`, `span` or `period`."""
    name: ClassVar[str] = "fit-memory"

    def __post_init__(self) -> None:
        check_memory_limit(self.memory_limit)
        if not (self.recompute or self.offload):
            raise SearchError("fit-memory needs recompute=True or offload=True")
        for error in objective_errors(self.objective):
            raise SearchError(error)

    @property
    def allowed(self) -> str:
        """What it may add, in words."""
        return " and ".join(name for name in ("recompute", "offload") if getattr(self, name))

    def __call__(self, schedule: Schedule) -> Schedule:
        """The schedule with what it needs to fit."""
        require_absent(schedule, self.name, *MEMORY_KINDS)
        return self.fitted(schedule).schedule

    def fitted(self, schedule: Schedule, is_late: Callable[[], bool] = lambda: False) -> Timeline:
        """Return the fastest that is found as a timeline; stop at the best so far once `is_late()`."""
        plain = self._timed(schedule)
        if self.fits(plain):
            return plain
        most = max(_FEWEST_POLICIES, 5 * _SIMULATED_STEPS // schedule.num_steps)
        tried, fitting = [plain], list[Timeline]()
        for each in islice(dict.fromkeys(self._uniform(schedule, plain.peak_memory)), most):
            if fitting and is_late():
                break
            tried.append(self._timed(each))
            fitting += filter(self.fits, tried[-1:])
        if not fitting:
            raise self._does_not_fit(min(tried, key=lambda each: max(each.peak_memory)))
        return self._without_needless(min(fitting, key=self.score), is_late)

    def fitted_simply(self, schedule: Schedule, is_late: Callable[[], bool] = lambda: False) -> Timeline | None:
        """Return the fastest simple policy; None if none fits, or none before `is_late()`."""
        plain = self._timed(schedule)
        if self.fits(plain):
            return plain
        policies = takewhile(lambda _: not is_late(), dict.fromkeys(self._simple(schedule, plain.peak_memory)))
        return min(filter(self.fits, map(self._timed, policies)), key=self.score, default=None)

    def fits(self, timeline: Timeline) -> bool:
        """Whether no rank exceeds the limit."""
        return not exceeds(max(timeline.peak_memory), self.memory_limit)

    def score(self, timeline: Timeline) -> tuple[float, int]:
        """The objective without the noise of its last digits, and the number of memory actions."""
        return _score(timeline, self.objective, *MEMORY_KINDS)

    def _simple(self, schedule: Schedule, peaks: Sequence[float]) -> Iterator[Schedule]:
        allowed = {"recompute": self.recompute, "offload": self.offload}
        return simple_policies(schedule, self.costs, self.memory_limit, peaks, **allowed)

    def _uniform(self, schedule: Schedule, peaks: Sequence[float]) -> Iterator[Schedule]:
        yield from self._simple(schedule, peaks)
        over = _stages_over(schedule, peaks, self.memory_limit)
        chosen = list(product((None, over), [*map(Policy, _EVERY), *(Policy(longer=n) for n in _LONGER)]))
        bases = [schedule]
        if self.recompute:
            yield from (Recompute(*each)(schedule) for each in chosen)
            bases.append(Recompute()(schedule))
        for base, each, ahead in product(bases, chosen, _AHEAD) if self.offload else ():
            yield Offload(*each, ahead)(base)

    def _without_needless(self, best: Timeline, is_late: Callable[[], bool]) -> Timeline:
        """Leave out the memory actions of one stage and microbatch after the other, where that is better."""
        most = max(_SIMULATED_STEPS // best.schedule.num_steps, 1)
        for codes in _removable(best.schedule)[:most]:
            if is_late():
                break
            rows = [row[~np.isin(row, codes)] for row in best.schedule.table.rows]
            changed = self._timed(best.schedule.with_rows(rows))
            if self.fits(changed) and self.score(changed) < self.score(best):
                best = changed
        return best

    def _timed(self, schedule: Schedule) -> Timeline:
        with_period = self.objective == "period"
        return simulate(schedule, self.costs, send_model=self.send_model, with_period=with_period)

    def _does_not_fit(self, least: Timeline) -> SearchError:
        peak, rank = max((peak, -rank) for rank, peak in enumerate(least.peak_memory))
        units = self.costs.units
        return SearchError(
            f"fit-memory: no policy of {self.allowed} fits the memory limit of "
            f"{units.memory(self.memory_limit)} per rank; the least that was found is "
            f"{units.memory(peak)}, on rank {-rank}: give more memory, another family, or more stages per rank"
        )


def simple_policies(
    schedule: Schedule,
    costs: Costs,
    limit: float,
    peaks: Sequence[float],
    *,
    recompute: bool,
    offload: bool,
) -> Iterator[Schedule]:
    """Yield the order with each simple policy, the least memory first; without one, ranks hold `peaks`."""
    over = _stages_over(schedule, peaks, limit) or None
    if recompute:
        needed = _fewest_stages(schedule, costs, limit) if over else None
        for stages in dict.fromkeys((None, needed, over)):
            yield Recompute(stages)(schedule)
    if recompute and offload:
        for ahead in _SIMPLY_AHEAD[:2]:
            yield Offload(ahead=ahead)(Recompute()(schedule))
    if offload:
        for stages, ahead in product(dict.fromkeys((None, over)), _SIMPLY_AHEAD[1:]):
            yield Offload(stages, ahead=ahead)(schedule)


def _stages_over(schedule: Schedule, peaks: Sequence[float], limit: float) -> tuple[int, ...]:
    """The stages of the ranks whose peak exceeds the limit."""
    own = schedule.placement.stages_of_rank
    return tuple(sorted(s for rank, peak in enumerate(peaks) if exceeds(peak, limit) for s in own[rank]))


def _fewest_stages(schedule: Schedule, costs: Costs, limit: float) -> tuple[int, ...] | None:
    """The fewest first stages of each rank that have to be recomputed; None if all are too few."""
    own = schedule.placement.stages_of_rank
    count = [0] * len(own)
    while True:
        stages = tuple(sorted(stage for rank, n in enumerate(count) for stage in own[rank][:n]))
        live = live_activations(Recompute(stages)(schedule).table)
        over = [rank for rank, each in enumerate(live) if exceeds(each.peak(costs, schedule.num_stages), limit)]
        if not over:
            return stages or None
        if any(count[rank] == len(own[rank]) for rank in over):
            return None
        for rank in over:
            count[rank] += 1


def _removable(schedule: Schedule) -> list[list[int]]:
    """The codes of what can be left out together, late microbatches first: less is held at the end."""
    table = schedule.table
    found = []
    for kinds in ((Kind.RECOMPUTE,), (Kind.OFFLOAD, Kind.RELOAD)):
        chosen = table.of_kind(kinds[0])
        at = zip(table.microbatch[chosen].tolist(), table.stage[chosen].tolist())
        found += [(microbatch, stage, kinds) for microbatch, stage in at]
    found.sort(key=lambda each: (-each[0], -each[1]))
    return [[code_of(kind, stage, microbatch) for kind in kinds] for microbatch, stage, kinds in found]


def without_memory_actions(schedule: Schedule) -> Schedule:
    """The same order without RECOMPUTE, OFFLOAD and RELOAD."""
    return schedule.only(kind for kind in Kind if kind not in MEMORY_KINDS)


# Sharding: where UNSHARD, RESHARD and REDUCE_GRAD go for the shortest makespan within a memory limit per rank.
#
#     look-aheads   `AddSharding(k)` for every k: what the result is compared with
#     plan          `plan_rank` for every rank
#
# Each is simulated. A plan that exceeds the limit while it runs, because a RESHARD waits behind another
# collective, is made again with fewer free bytes in the steps concerned.
#
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


def plan_rank(rank: RankSteps, free: Floats) -> Bools:
    """Per stage and step: whether it is unsharded, with so many `free` bytes at each step.

    A gather is started in time for its use where there is room, at the expense of stages that are used later.
    The stages that a step uses are unsharded even where they do not fit.
    """
    holds = _holds(rank)
    _evict(rank, free, holds)
    held = rank.used.copy()
    for hold in holds:
        held[hold.stage, hold.start : hold.use] = True
    left = free - np.array(rank.size) @ held
    _gather_ahead(rank, left, holds, held)
    return held


def _holds(rank: RankSteps) -> list[_Hold]:
    """One for each use that does not directly follow another, in the order of the uses; all gaps are kept."""
    found = []
    for stage, used in enumerate(rank.used):
        before = -1
        for use in np.flatnonzero(used).tolist():
            if use > before + 1 or before < 0:
                in_time = rank.start[use] - rank.gather[stage]
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
_REPAIRS = 8


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
        base = simulate(schedule, self.costs, send_model=self.send_model)
        stages = max(map(len, schedule.placement.stages_of_rank))
        fixed = [
            self._timed(AddGradReduction()(AddSharding(count)(schedule))) for count in range(1, stages + 1)
        ]
        found = sorted((each for each in fixed if not self._over(each)), key=self._score)[:1]
        planned = self._planned(base)
        if planned is not None and (not found or self._score(planned)[1] <= self._score(found[0])[1]):
            found.append(planned)
        if not found:
            raise self._does_not_fit(fixed[0])
        return min(found, key=self._score).schedule

    def _planned(self, base: Timeline) -> Timeline | None:
        """All ranks planned, with fewer free bytes where the simulation exceeds the limit."""
        schedule = base.schedule
        ranks = [self._rank_steps(base, rank) for rank in range(schedule.num_ranks)]
        free = self._free_bytes(schedule)
        held = list(map(plan_rank, ranks, free))
        reduced = AddGradReduction()(schedule)
        for repair in range(_REPAIRS + 1):
            placed = self._timed(with_sharding(reduced, lambda rank, _: _per_slot(reduced, rank, held[rank])))
            over = self._over(placed)
            if not over:
                return placed
            for rank in over:
                ends = placed.end[_compute_slots(placed.schedule.table, rank)]
                excess = _peaks(placed.memory[rank], ends) - self._limit
                free[rank] -= np.maximum(excess, 0)
                if repair == _REPAIRS - 1 or not (excess > 0).any():
                    free[rank][:] = 0
                held[rank] = plan_rank(ranks[rank], free[rank])
        return None

    def _rank_steps(self, base: Timeline, rank: int) -> RankSteps:
        table = base.schedule.table
        slots, stages = _compute_slots(table, rank), np.array(table.placement.stages_of_rank[rank])
        parts = np.arange(*table.part_bounds[rank : rank + 2])
        parts = parts[table.is_compute[parts]]
        used = np.zeros((len(stages), len(slots)), dtype=np.bool_)
        used[np.searchsorted(stages, table.stage[parts]), np.searchsorted(slots, table.slot[parts])] = True
        size, gather = (
            np.array(self.costs.per_stage(name, table.placement.num_stages))[stages].tolist()
            for name in ("unsharded_parameters", "unshard")
        )
        return RankSteps(used, base.start[slots], base.end[slots], size, gather)

    def _free_bytes(self, schedule: Schedule) -> list[Floats]:
        """Per rank and step: bytes that are left for unsharded parameters, by the order of the steps."""
        clock = np.arange(schedule.num_steps, dtype=np.float64) * 2
        memory = memory_over_time(schedule.table, schedule.messages, self.costs, clock, clock + 1)
        return [
            self._limit - _peaks(each, clock[_compute_slots(schedule.table, rank)] + 1)
            for rank, each in enumerate(memory)
        ]

    def _timed(self, schedule: Schedule) -> Timeline:
        simulator = Simulator(schedule, self.costs, self.send_model)
        return simulator.timeline(simulator.finished_run())

    def _score(self, timeline: Timeline) -> tuple[float, int]:
        return _score(timeline, "makespan", Kind.UNSHARD)

    @property
    def _limit(self) -> float:
        return inf if self.memory_limit is None else float(self.memory_limit)

    def _over(self, timeline: Timeline) -> list[int]:
        """The ranks that exceed the limit."""
        return [rank for rank, peak in enumerate(timeline.peak_memory) if exceeds(peak, self._limit)]

    def _does_not_fit(self, tightest: Timeline) -> SearchError:
        units, peaks = self.costs.units, tightest.peak_memory
        over = [f"rank {rank} needs {units.memory(peaks[rank])}" for rank in self._over(tightest)]
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
