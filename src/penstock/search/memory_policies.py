"""Memory policies: what is recomputed and offloaded so that an order fits a memory limit, in the least time.

    simple     all stages, the stages of ranks that hold too much, or the fewest that are enough: recomputed,
               offloaded, or both; a plan tries these in every configuration
    uniform    also every n-th microbatch, or those that live long, and several distances of RELOAD and use
    single     from the fastest that fits, single microbatches of a stage are left out as long as the rest fits
               and is no slower

Every candidate is simulated. The order of the other actions stays as it is; `policy_search` changes it too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, product, takewhile
from typing import ClassVar

import numpy as np

from penstock.arguments import printable
from penstock.bounds import OBJECTIVES
from penstock.cost.costs import Costs
from penstock.cost.memory import exceeds, live_activations
from penstock.errors import Parameter, SearchError
from penstock.ir.encoding import code_of
from penstock.ir.kinds import MEMORY_KINDS, Kind
from penstock.ir.schedule import Schedule
from penstock.lowering import Offload, Pass, Policy, Recompute
from penstock.lowering.passes import require_absent
from penstock.search.request import check_memory_limit, rounded
from penstock.simulation.simulator import simulate
from penstock.simulation.timeline import Timeline
from penstock.validation import SendModel

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
        if self.objective not in OBJECTIVES:
            given = printable(repr(self.objective))
            raise SearchError(
                Parameter("objective"), f" must be one of {', '.join(OBJECTIVES)} (given {given})"
            )

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
        return _Fitting(schedule, self, is_late).best()

    def fitted_simply(self, schedule: Schedule, is_late: Callable[[], bool] = lambda: False) -> Timeline | None:
        """Return the fastest simple policy; None if none fits, or none before `is_late()`."""
        return _Fitting(schedule, self, is_late).simple()

    def fits(self, timeline: Timeline) -> bool:
        """Whether no rank exceeds the limit."""
        return not exceeds(max(timeline.peak_memory), self.memory_limit)

    def score(self, timeline: Timeline) -> tuple[float, int]:
        """The objective without the noise of its last digits, and the number of memory actions."""
        actions = int(timeline.schedule.table.of_kind(*MEMORY_KINDS).sum())
        return rounded(timeline.length(self.objective)), actions


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


class _Fitting:
    """One schedule and its limit."""

    def __init__(self, schedule: Schedule, options: FitMemory, is_late: Callable[[], bool]) -> None:
        self._schedule, self._options, self._is_late = schedule, options, is_late
        self._plain = self._timed(schedule)

    def simple(self) -> Timeline | None:
        fits, score = self._options.fits, self._options.score
        if fits(self._plain):
            return self._plain
        policies = takewhile(lambda _: not self._is_late(), dict.fromkeys(self._simple()))
        return min(filter(fits, map(self._timed, policies)), key=score, default=None)

    def best(self) -> Timeline:
        fits = self._options.fits
        if fits(self._plain):
            return self._plain
        most = max(_FEWEST_POLICIES, 5 * _SIMULATED_STEPS // self._schedule.num_steps)
        tried: list[Timeline] = []
        fitting: list[Timeline] = []
        for each in islice(dict.fromkeys(self._uniform()), most):
            if fitting and self._is_late():
                break
            tried.append(self._timed(each))
            fitting += filter(fits, tried[-1:])
        if not fitting:
            raise self._does_not_fit(min([self._plain, *tried], key=lambda each: max(each.peak_memory)))
        return self._without_needless(min(fitting, key=self._options.score))

    # --- candidates --------------------------------------------------------------------------------

    def _simple(self) -> Iterator[Schedule]:
        options, peaks = self._options, self._plain.peak_memory
        return simple_policies(
            self._schedule,
            options.costs,
            options.memory_limit,
            peaks,
            recompute=options.recompute,
            offload=options.offload,
        )

    def _uniform(self) -> Iterator[Schedule]:
        yield from self._simple()
        options = self._options
        over = _stages_over(self._schedule, self._plain.peak_memory, options.memory_limit)
        chosen = list(product((None, over), [*map(Policy, _EVERY), *(Policy(longer=n) for n in _LONGER)]))
        bases = [self._schedule]
        if options.recompute:
            yield from (Recompute(*each)(self._schedule) for each in chosen)
            bases.append(Recompute()(self._schedule))
        for base, each, ahead in product(bases, chosen, _AHEAD) if options.offload else ():
            yield Offload(*each, ahead)(base)

    # --- single microbatches -----------------------------------------------------------------------

    def _without_needless(self, best: Timeline) -> Timeline:
        """Leave out the memory actions of one stage and microbatch after the other, where that is better."""
        left = max(_SIMULATED_STEPS // best.schedule.num_steps, 1)
        for kinds, stage, microbatch in _removable(best.schedule)[:left]:
            if self._is_late():
                break
            changed = self._timed(_without(best.schedule, kinds, stage, microbatch))
            if self._options.fits(changed) and self._options.score(changed) < self._options.score(best):
                best = changed
        return best

    # --- simulation --------------------------------------------------------------------------------

    def _timed(self, schedule: Schedule) -> Timeline:
        options = self._options
        with_period = options.objective == "period"
        return simulate(schedule, options.costs, send_model=options.send_model, with_period=with_period)

    def _does_not_fit(self, least: Timeline) -> SearchError:
        peak, rank = max((peak, -rank) for rank, peak in enumerate(least.peak_memory))
        options, units = self._options, self._options.costs.units
        return SearchError(
            f"fit-memory: no policy of {options.allowed} fits the memory limit of "
            f"{units.memory(options.memory_limit)} per rank; the least that was found is "
            f"{units.memory(peak)}, on rank {-rank}: give more memory, another family, or more stages per rank"
        )


def _removable(schedule: Schedule) -> list[tuple[tuple[Kind, ...], int, int]]:
    """Kinds, stage and microbatch of what can be left out, late microbatches first: less is held at the end."""
    table = schedule.table
    found = []
    for kinds in ((Kind.RECOMPUTE,), (Kind.OFFLOAD, Kind.RELOAD)):
        parts = np.flatnonzero(table.of_kind(kinds[0]))
        where = zip(table.stage[parts].tolist(), table.microbatch[parts].tolist())
        found += [(kinds, stage, microbatch) for stage, microbatch in where]
    return sorted(found, key=lambda each: (-each[2], -each[1]))


def _without(schedule: Schedule, kinds: Sequence[Kind], stage: int, microbatch: int) -> Schedule:
    dropped = [code_of(kind, stage, microbatch) for kind in kinds]
    return schedule.with_rows([row[~np.isin(row, dropped)] for row in schedule.table.rows])


def without_memory_actions(schedule: Schedule) -> Schedule:
    """The same order without RECOMPUTE, OFFLOAD and RELOAD."""
    return schedule.only(kind for kind in Kind if kind not in MEMORY_KINDS)
