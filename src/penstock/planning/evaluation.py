"""Weighing options: every family in every frame, so far as it can matter.

What cannot matter is not simulated. An option is cut when another that was simulated needs no more memory and
is no slower than this one's lower bound: it can neither win nor be on the frontier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from math import inf
from statistics import fmean
from time import perf_counter
from typing import TypeAlias

from penstock.bounds import Bound
from penstock.families import build, families
from penstock.ir.action import Kind
from penstock.ir.schedule import Schedule
from penstock.planning.configuration import Frame, cut_that_fits, framed, frames, is_too_long
from penstock.planning.live_memory import Holding, holdings
from penstock.planning.options import Left, Option
from penstock.planning.partition import Counts
from penstock.planning.request import Question
from penstock.search import Progress
from penstock.simulation.simulator import simulate

__all__ = ["Told", "Weighing", "orders"]


Told: TypeAlias = Callable[[Progress], None]


class Weighing:
    """What was found so far; it can be stopped at any time."""

    def __init__(self, question: Question, told: Told | None = None) -> None:
        self.question, self.told, self._begun = question, told or (lambda _: None), perf_counter()
        self.options: list[Option] = []
        self.too_large: list[Left] = []
        self.cut: list[Left] = []
        """Those whose bounds say that they cannot matter."""
        self.is_shaken = False
        """Whether the options are ranked by their quantiles under jitter."""
        self.missing: set[str] = set()
        """What searches could not use because it is not installed."""

    @cached_property
    def _all_frames(self) -> list[Frame]:
        return list(frames(self.question))

    @cached_property
    def frames(self) -> list[tuple[Bound, Frame]]:
        """Every frame that is weighed, lowest bound first."""
        short = [frame for frame in self._all_frames if not is_too_long(frame)]
        bounded = [(frame.bound(self.question), frame) for frame in short]
        return sorted(bounded, key=lambda pair: (pair[0].seconds, pair[1].placement.num_stages))

    @property
    def too_long(self) -> int:
        """How many frames have too many stages and microbatches to be weighed."""
        return len(self._all_frames) - len(self.frames)

    @property
    def bound(self) -> float:
        """What no order in any of the frames can stay below, those that were made to fit included."""
        every = [*(bound for bound, _ in self.frames), *(option.bound for option in self.options)]
        return min((bound.seconds for bound in every), default=0.0)

    # --- families ----------------------------------------------------------------------------------

    def weigh_families(self) -> None:
        """Every family in every frame that it can be built for."""
        groups: dict[tuple[int, int], list[Frame]] = {}
        for _, frame in self.frames:
            groups.setdefault((frame.stages_per_rank, frame.microbatches), []).append(frame)
        for done, ((legs, m), group) in enumerate(groups.items()):
            self.tell(f"families with v={legs}, m={m}", done / len(groups))
            for name, schedule in orders(self.question.ranks, m, legs):
                own = [frame for frame in group if frame.placement == schedule.placement]
                self._weigh_order(name, schedule, own)

    def _weigh_order(self, name: str, schedule: Schedule, own: list[Frame]) -> None:
        held, limit = holdings(schedule), self.question.memory_limit or inf

        def need(frame: Frame) -> float:
            return max(each.peak(frame.costs, schedule.num_stages) for each in held)

        fitting = [frame for frame in own if need(frame) <= limit]
        if own and own[0] not in fitting:
            counts = self._fitting_cut(own[0], held)
            if counts is not None:
                fitting.append(framed(self.question, own[0].placement, counts, own[0].microbatches))
        if own and not fitting:
            bound = own[0].bound(self.question, split=schedule.table.has(Kind.I))
            self.too_large.append(Left(name, own[0], min(map(need, own)), bound.seconds))
        for frame in dict.fromkeys(fitting):
            self._weigh(name, schedule, frame, need(frame))

    def _fitting_cut(self, frame: Frame, held: Sequence[Holding]) -> Counts | None:
        """Looked for unless that is long and in vain: several stages per rank, and the mean rank too large."""
        limit = self.question.memory_limit
        peaks = [each.peak(frame.costs, frame.placement.num_stages) for each in held]
        if frame.stages_per_rank > 1 and limit is not None and fmean(peaks) > limit:
            return None
        return cut_that_fits(self.question, frame, held)

    def _weigh(self, name: str, schedule: Schedule, frame: Frame, memory: float) -> None:
        table = schedule.table
        paired = bool((table.slot[1:] == table.slot[:-1]).any())
        own_bound = frame.bound(self.question, split=table.has(Kind.I), paired=paired)
        if any(option.memory <= memory and self._beats(option, own_bound) for option in self.options):
            self.cut.append(Left(name, frame, memory, own_bound.seconds))
            return
        self.options.append(self.option(name, frame, schedule))

    def _beats(self, option: Option, bound: Bound) -> bool:
        """Whether it is no slower than the bound, with jitter even if it varies as much as a step does."""
        return option.plain_seconds * (1 + (self.question.jitter or 0.0)) <= bound.seconds

    def option(self, name: str, frame: Frame, schedule: Schedule, found_by: str = "") -> Option:
        """An order in a frame, simulated."""
        timeline = simulate(schedule, frame.costs, with_period=self.question.objective == "period")
        seconds, bound = self.question.seconds_of(timeline), frame.bound(self.question)
        return Option(name, frame, schedule, timeline, seconds, bound, seconds, found_by)

    def tell(self, doing: str, share: float = 0.0, best: float = inf) -> None:
        """What is being done, how much of it is done, and the best so far."""
        best = min([best, *(option.seconds for option in self.options)])
        self.told(Progress(doing, best, self.bound, perf_counter() - self._begun, share))


def orders(ranks: int, microbatches: int, legs: int) -> Iterator[tuple[str, Schedule]]:
    """The families that train with so many stages per rank, each order once, by the most fitting name."""
    seen: set[tuple[tuple[int, ...], bytes]] = set()
    fitting = [name for name, family in families().items() if family.stages_per_rank in (None, legs)]
    for name in sorted(fitting, key=lambda name: families()[name].stages_per_rank is None):
        schedule = build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=legs)
        key = (schedule.placement.stage_to_rank, schedule.table.code.tobytes())
        if schedule.table.has(Kind.B, Kind.I) and key not in seen:
            seen.add(key)
            yield name, schedule
