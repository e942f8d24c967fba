"""Recompute and offload what a memory limit needs, where simulation says that it costs the least time.

    policies   `Recompute` and `Offload` for all stages, or for those of the ranks that hold too much; with
               several policies for microbatches and distances of a RELOAD from its use
    single     from the fastest that fits, single microbatches of a stage are left out as long as the rest fits
               and is no slower

Every candidate is simulated. The order of the other actions stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, product, takewhile
from typing import ClassVar, NamedTuple

import numpy as np

from penstock.arguments import printable
from penstock.bounds import OBJECTIVES
from penstock.cost.costs import Costs
from penstock.cost.memory import exceeds
from penstock.errors import SearchError
from penstock.ir.encoding import kinds_in, microbatches_in, stages_in
from penstock.ir.kinds import MEMORY_KINDS, Kind
from penstock.ir.schedule import Schedule
from penstock.lowering import Offload, Pass, Policy, Recompute
from penstock.lowering.passes import require_absent
from penstock.search.result import check_memory_limit, rounded
from penstock.simulation.simulator import simulate
from penstock.simulation.timeline import Timeline
from penstock.validation import SendModel

_EVERY, _LONGER, _AHEAD = (1, 2, 3), (1, 2, 4, 8, 16), (0, 1, 2, 4)
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
            raise SearchError(f"objective must be one of {', '.join(OBJECTIVES)} (given {given})")

    @property
    def techniques(self) -> str:
        """What it may add, in words."""
        return " and ".join(name for name in ("recompute", "offload") if getattr(self, name))

    def __call__(self, schedule: Schedule) -> Schedule:
        """The schedule with what it needs to fit."""
        require_absent(schedule, self.name, *MEMORY_KINDS)
        return self.fitted(schedule).schedule

    def fitted(self, schedule: Schedule, is_late: Callable[[], bool] = lambda: False) -> Timeline:
        """The same, simulated; when it is late, the best so far."""
        return _Fitting(schedule, self, is_late).best()

    def fitted_simply(self, schedule: Schedule, is_late: Callable[[], bool] = lambda: False) -> Timeline | None:
        """The same with the simplest policies only; None if none of them fits, or none before it is late."""
        return _Fitting(schedule, self, is_late).simple()


class _Pair(NamedTuple):
    """A stage and a microbatch whose actions of these kinds are left out together."""

    kinds: tuple[Kind, ...]
    stage: int
    microbatch: int


class _Fitting:
    """One schedule and its limit."""

    def __init__(self, schedule: Schedule, options: FitMemory, is_late: Callable[[], bool]) -> None:
        self._schedule, self._options, self._is_late = schedule, options, is_late
        self._plain = self._timed(schedule)

    def simple(self) -> Timeline | None:
        if self._fits(self._plain):
            return self._plain
        policies = takewhile(lambda _: not self._is_late(), dict.fromkeys(self._simple()))
        return min(filter(self._fits, map(self._timed, policies)), key=self._score, default=None)

    def best(self) -> Timeline:
        if self._fits(self._plain):
            return self._plain
        most = max(_FEWEST_POLICIES, 5 * _SIMULATED_STEPS // self._schedule.num_steps)
        candidates: list[Timeline] = []
        fitting: list[Timeline] = []
        for each in islice(dict.fromkeys(self._policies()), most):
            if fitting and self._is_late():
                break
            candidates.append(self._timed(each))
            fitting += filter(self._fits, candidates[-1:])
        if not fitting:
            raise self._does_not_fit(min([self._plain, *candidates], key=lambda each: max(each.peak_memory)))
        return self._without_needless(min(fitting, key=self._score))

    # --- candidates --------------------------------------------------------------------------------

    @cached_property
    def _stages(self) -> list[tuple[int, ...] | None]:
        """All stages, and those of the ranks that hold too much."""
        own, limit = self._schedule.placement.stages_of_rank, self._options.memory_limit
        over = [rank for rank, peak in enumerate(self._plain.peak_memory) if exceeds(peak, limit)]
        return [None, tuple(sorted(stage for rank in over for stage in own[rank]))]

    def _simple(self) -> Iterator[Schedule]:
        """Everything, or everything of the ranks that hold too much."""
        options, plain = self._options, self._schedule
        again = Recompute()(plain)
        for stages in self._stages:
            if options.recompute:
                yield Recompute(stages)(plain)
            if options.offload:
                yield Offload(stages)(plain)
        if options.recompute and options.offload:
            yield Offload(ahead=0)(again)

    def _policies(self) -> Iterator[Schedule]:
        options, policies = self._options, [*map(Policy, _EVERY), *(Policy(longer=n) for n in _LONGER)]
        again = [Recompute(*each)(self._schedule) for each in product(self._stages, policies)]
        if options.recompute:
            yield from again[:1]  # what holds the least comes first
            if options.offload:
                yield Offload(ahead=0)(again[0])
            yield from again
        if options.offload:
            bases = [self._schedule, *(again[:1] if options.recompute else [])]
            for base, stages, policy, ahead in product(bases, self._stages, policies, _AHEAD):
                yield Offload(stages, policy, ahead)(base)

    # --- single microbatches -----------------------------------------------------------------------

    def _without_needless(self, best: Timeline) -> Timeline:
        """Leave out one pair after the other as long as the rest fits and is no slower."""
        left = max(_SIMULATED_STEPS // best.schedule.num_steps, 1)
        for pair in self._pairs(best.schedule)[:left]:
            if self._is_late():
                break
            changed = self._timed(_without(best.schedule, pair))
            if self._fits(changed) and self._score(changed) < self._score(best):
                best = changed
        return best

    @staticmethod
    def _pairs(schedule: Schedule) -> list[_Pair]:
        """What can be left out, late microbatches first: at the end of an iteration less is held."""
        table = schedule.table
        found = []
        for kinds in ((Kind.RECOMPUTE,), (Kind.OFFLOAD, Kind.RELOAD)):
            parts = np.flatnonzero(table.of_kind(kinds[0]))
            pairs = zip(table.stage[parts].tolist(), table.microbatch[parts].tolist())
            found += [_Pair(kinds, stage, microbatch) for stage, microbatch in pairs]
        return sorted(found, key=lambda pair: (-pair.microbatch, -pair.stage))

    # --- simulation --------------------------------------------------------------------------------

    def _timed(self, schedule: Schedule) -> Timeline:
        options = self._options
        with_period = options.objective == "period"
        return simulate(schedule, options.costs, send_model=options.send_model, with_period=with_period)

    def _score(self, timeline: Timeline) -> tuple[float, int]:
        """The objective without the noise of its last digits, and the number of memory actions."""
        actions = int(timeline.schedule.table.of_kind(*MEMORY_KINDS).sum())
        return rounded(timeline.length(self._options.objective)), actions

    def _fits(self, timeline: Timeline) -> bool:
        return not exceeds(max(timeline.peak_memory), self._options.memory_limit)

    def _does_not_fit(self, least: Timeline) -> SearchError:
        peak, rank = max((peak, -rank) for rank, peak in enumerate(least.peak_memory))
        options, units = self._options, self._options.costs.units
        return SearchError(
            f"fit-memory: no policy of {options.techniques} fits the memory limit of "
            f"{units.memory(options.memory_limit)} per rank; the least that was found is "
            f"{units.memory(peak)}, on rank {-rank}: give more memory, another family, or more stages per rank"
        )


def _without(schedule: Schedule, pair: _Pair) -> Schedule:
    numbers = [kind.number for kind in pair.kinds]
    rows = []
    for row in schedule.table.rows:
        stage, microbatch = stages_in(row), microbatches_in(row)
        dropped = np.isin(kinds_in(row), numbers) & (stage == pair.stage) & (microbatch == pair.microbatch)
        rows.append(row[~dropped])
    return schedule.with_rows(rows)


def without_memory_actions(schedule: Schedule) -> Schedule:
    """The same order without RECOMPUTE, OFFLOAD and RELOAD."""
    return schedule.only(kind for kind in Kind if kind not in MEMORY_KINDS)
