"""Weighing options: families in every frame, then searched orders for the frames with the lowest bounds.

What cannot matter is not simulated. An option is cut when another that was simulated needs no more memory and
is no slower than this one's lower bound: it can neither win nor be on the frontier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from time import monotonic
from typing import Any, TypeAlias

from penstock.action import Kind
from penstock.bounds import Bound
from penstock.costs import Costs
from penstock.errors import SearchError
from penstock.families import build, families
from penstock.jitter import jitter
from penstock.planning.frames import Frame, cut_that_fits, framed, frames, is_too_long
from penstock.planning.holding import holdings
from penstock.planning.options import Left, Option, frontier
from penstock.planning.question import Question
from penstock.schedule import Schedule
from penstock.simulator import simulate
from penstock.timeline import Timeline

__all__ = ["Progress", "Searcher", "Told", "Weighing", "plain_seconds", "shaken_seconds"]

SEARCHED_FRAMES = 4

Searcher: TypeAlias = Callable[..., Any]
"""As `penstock.search.search`."""


@dataclass(frozen=True)
class Progress:
    """How far it is: what is being done, and the best so far."""

    doing: str
    done: int
    total: int
    best: float | None
    bound: float

    @property
    def gap(self) -> float | None:
        """How much longer than the bound the best is, as a share of it."""
        return None if self.best is None or not self.bound else self.best / self.bound - 1


Told: TypeAlias = Callable[[Progress], None]


class Weighing:
    """What was found so far; it can be stopped at any time."""

    def __init__(self, question: Question, told: Told | None, searcher: Searcher) -> None:
        self.question, self._told, self._searcher = question, told or (lambda _: None), searcher
        self.options: list[Option] = []
        self.too_large: list[Left] = []
        self.cut: list[Left] = []
        """Those whose bounds say that they cannot matter."""
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
            self._tell(f"families with v={legs}, m={m}", done, len(groups))
            for name, schedule in _orders(self.question.ranks, m, legs):
                own = [frame for frame in group if frame.placement == schedule.placement]
                self._weigh_order(name, schedule, own)

    def _weigh_order(self, name: str, schedule: Schedule, own: list[Frame]) -> None:
        held, limit = holdings(schedule), self.question.memory_limit
        needs = [max(each.peak(frame.costs, schedule.num_stages) for each in held) for frame in own]
        fitting = [(frame, need) for frame, need in zip(own, needs) if limit is None or need <= limit]
        if own and not fitting:
            first = own[0]
            peaks = [each.peak(first.costs, schedule.num_stages) for each in held]
            counts = None
            if limit is not None and sum(peaks) / len(peaks) <= limit:  # else no other cut can help
                counts = cut_that_fits(self.question, first.placement, held, first.samples)
            if counts is None:
                bound = first.bound(self.question, split=schedule.columns.has(Kind.I))
                self.too_large.append(Left(name, first, min(needs), bound.seconds))
                return
            other = framed(self.question, first.placement, counts, first.microbatches)
            fitting = [(other, max(each.peak(other.costs, schedule.num_stages) for each in held))]
        for frame, need in fitting:
            self._weigh(name, schedule, frame, need)

    def _weigh(self, name: str, schedule: Schedule, frame: Frame, memory: float) -> None:
        columns = schedule.columns
        paired = bool((columns.slot[1:] == columns.slot[:-1]).any())
        own_bound = frame.bound(self.question, split=columns.has(Kind.I), paired=paired)
        if any(option.memory <= memory and self._beats(option, own_bound) for option in self.options):
            self.cut.append(Left(name, frame, memory, own_bound.seconds))
            return
        self._add(name, frame, schedule)

    def _beats(self, option: Option, bound: Bound) -> bool:
        """Whether it is no slower than the bound, with jitter even if it varies as much as a step does."""
        return option.plain_seconds * (1 + (self.question.jitter or 0.0)) <= bound.seconds

    def _add(self, name: str, frame: Frame, schedule: Schedule, found_by: str = "") -> None:
        timeline = simulate(schedule, frame.costs)
        seconds, bound = plain_seconds(self.question, timeline), frame.bound(self.question)
        self.options.append(Option(name, frame, schedule, timeline, seconds, bound, seconds, found_by))

    # --- searched orders ---------------------------------------------------------------------------

    def search(self) -> None:
        """Orders for the few frames whose bounds promise most, each with an equal share of the time left."""
        question, until = self.question, monotonic() + self.question.seconds
        if not question.seconds:
            return
        for done, (bound, frame) in enumerate(promising := self._promising()):
            if self.options and bound.seconds >= min(option.plain_seconds for option in self.options):
                continue
            doing = f"searching v={frame.stages_per_rank}, m={frame.microbatches}"
            self._tell(doing, done, len(promising))
            self._search(frame, (until - monotonic()) / (len(promising) - done), doing)

    def _promising(self) -> list[tuple[Bound, Frame]]:
        """Frames by the bounds of orders without pairs, which is what is searched; also those made to fit."""
        limit = self.question.memory_limit
        every = [*(option.frame for option in self.options), *(frame for _, frame in self.frames)]
        small = [frame for frame in every if limit is None or max(frame.fixed) < limit]
        known = {(frame.placement, frame.counts, frame.microbatches): frame for frame in small}
        bounded = [(frame.bound(self.question, paired=False), frame) for frame in known.values()]
        ordered = sorted(bounded, key=lambda pair: (pair[0].seconds, pair[1].placement.num_stages))
        return ordered[:SEARCHED_FRAMES]

    def _search(self, frame: Frame, seconds: float, doing: str) -> None:
        question, extra = self.question, frame.costs.optimizer_step

        def told(progress: Any) -> None:  # noqa: ANN401 -- the searcher's own
            known = [option.plain_seconds for option in self.options]
            best = min([*known, *([] if progress.best is None else [progress.best + extra])], default=None)
            self._told(Progress(doing, 0, 0, best, self.bound))

        try:
            result = self._searcher(
                ranks=question.ranks,
                microbatches=frame.microbatches,
                costs=frame.costs,
                placement=frame.placement,
                stages_per_rank=frame.stages_per_rank,
                memory_limit=question.memory_limit,
                objective=question.objective,
                seconds=max(seconds, 0.1),
                seed=question.seed,
                told=told,
            )
        except SearchError:  # no order fits in this frame, which its families have told already
            return
        self.missing |= set(result.missing)
        if not any(option.frame == frame and option.schedule == result.schedule for option in self.options):
            self._add("searched", frame, result.schedule, result.found_by)
        if result.interrupted:  # the search keeps its best, and so do we
            raise KeyboardInterrupt

    # --- jitter ------------------------------------------------------------------------------------

    def shake(self) -> None:
        """Rank by the quantile: of the frontier, and of all that could be faster than the best quantile."""
        if self.question.jitter is None:
            return
        kept = frontier(self.options)
        shaken: list[Option] = []
        rest = sorted((o for o in self.options if o not in kept), key=lambda each: each.order)
        for done, option in enumerate(everything := [*kept, *rest]):
            if done >= len(kept) and option.plain_seconds > min(each.seconds for each in shaken):
                self.cut += [Left(o.name, o.frame, o.memory, o.plain_seconds) for o in everything[done:]]
                break
            self._tell("shaking", done, len(everything))
            shaken.append(self._shaken(option))
        self.options = shaken

    def _shaken(self, option: Option) -> Option:
        return replace(option, seconds=shaken_seconds(self.question, option.schedule, option.frame.costs))

    def _tell(self, doing: str, done: int, total: int) -> None:
        best = min((option.seconds for option in self.options), default=None)
        self._told(Progress(doing, done, total, best, self.bound))


def plain_seconds(question: Question, timeline: Timeline) -> float:
    """The objective, optimizer step included, without jitter."""
    seconds: float = getattr(timeline, question.objective)
    return seconds if question.objective == "period" else seconds + timeline.costs.optimizer_step


def shaken_seconds(question: Question, schedule: Schedule, costs: Costs) -> float:
    """The quantile under jitter, optimizer step included."""
    assert question.jitter is not None
    spread = jitter(schedule, costs, noise=question.jitter, seed=question.seed)
    return spread.quantile(question.quantile) + costs.optimizer_step


def _orders(ranks: int, microbatches: int, legs: int) -> Iterator[tuple[str, Schedule]]:
    """The families that train with so many stages per rank, each order once, by the most fitting name."""
    seen: set[tuple[tuple[int, ...], bytes]] = set()
    fitting = [name for name, family in families().items() if family.stages_per_rank in (None, legs)]
    for name in sorted(fitting, key=lambda name: families()[name].stages_per_rank is None):
        schedule = build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=legs)
        key = (schedule.placement.stage_to_rank, schedule.columns.code.tobytes())
        if schedule.columns.has(Kind.B, Kind.I) and key not in seen:
            seen.add(key)
            yield name, schedule
