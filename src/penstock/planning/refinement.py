"""Bettering the best options: other cuts for their orders, and searched orders for promising frames."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from math import inf
from time import monotonic
from typing import TypeAlias

from penstock.errors import SearchError
from penstock.planning.configuration import Frame, framed
from penstock.planning.evaluation import Weighing
from penstock.planning.live_memory import holdings
from penstock.planning.options import Option
from penstock.planning.partition import with_move
from penstock.search import Progress, SearchResult

__all__ = ["Searcher", "better"]

CUT_AGAIN, SEARCHED_FRAMES = 3, 2
_FOR_CUTS, _FOR_FRAMES = 0.15, 0.4
"""Of the time for searching: what these options and these frames get together."""
_UNKNOWN = 1.1
"""How far above its bound an order in a frame without families is thought to be."""
_ROUNDING = 1e-9

Searcher: TypeAlias = Callable[..., SearchResult]
"""As `penstock.search.search`."""


def better(weighing: Weighing, searcher: Searcher) -> None:
    """Cuts for the best few orders, orders for a few frames, then both for the best with the time left."""
    question = weighing.question
    seconds, until = question.seconds, monotonic() + question.seconds
    if not seconds:
        return
    for option in sorted(weighing.options, key=lambda each: each.order)[:CUT_AGAIN]:
        _cut_again(weighing, option, seconds * _FOR_CUTS / CUT_AGAIN)
    searched = _promising(weighing)[:SEARCHED_FRAMES]
    for frame in searched:
        if _may_be_better(weighing, _least(weighing, frame)):
            _search(weighing, searcher, frame, seconds * _FOR_FRAMES / len(searched), question.seed)
    if weighing.options:
        _cut_again(weighing, _best(weighing), (until - monotonic()) / 5)
        frame = _best(weighing).frame
        if _may_be_better(weighing, _least(weighing, frame)):
            _search(weighing, searcher, frame, until - monotonic(), question.seed + 1)


def _best(weighing: Weighing) -> Option:
    return min(weighing.options, key=lambda option: option.order)


def _least(weighing: Weighing, frame: Frame) -> float:
    """What no order that is searched, which has no pairs, can stay below."""
    return frame.bound(weighing.question, paired=False).seconds


def _may_be_better(weighing: Weighing, least: float) -> bool:
    return all(least < option.plain_seconds * (1 - _ROUNDING) for option in weighing.options)


def _cut_again(weighing: Weighing, option: Option, seconds: float) -> None:
    """The same order with one layer moved from stage to stage, as long as that makes it faster."""
    question, until, best = weighing.question, monotonic() + seconds, option
    tried = {other.frame.counts for other in weighing.options if other.schedule == option.schedule}
    held, limit = holdings(option.schedule), question.memory_limit or inf
    stages, better = option.schedule.num_stages, True
    while better:
        better = False
        for pair in permutations(range(stages), 2):
            counts = with_move(best.frame.counts, *pair)
            if counts in tried or not counts[pair[0]]:
                continue
            if monotonic() > until:
                break
            tried.add(counts)
            frame = framed(question, option.frame.placement, counts, option.frame.microbatches)
            fits = max(each.peak(frame.costs, stages) for each in held) <= limit
            if not fits or frame.bound(question).seconds >= best.plain_seconds:
                continue
            weighing.tell(f"cutting again for {option}")
            other = weighing.option(option.name, frame, option.schedule, option.found_by)
            if other.plain_seconds < best.plain_seconds * (1 - _ROUNDING):
                if best is not option or other.memory <= best.memory:
                    weighing.options.remove(best)
                weighing.options.append(other)
                best, better = other, True


def _promising(weighing: Weighing) -> list[Frame]:
    """Frames half by their bounds and half by the best order known; also those made to fit."""
    question = weighing.question
    every = [*(option.frame for option in weighing.options), *(frame for _, frame in weighing.frames)]
    small = [frame for frame in every if max(frame.fixed) < (question.memory_limit or inf)]
    least = {frame: _least(weighing, frame) for frame in dict.fromkeys(small)}
    best: dict[Frame, float] = {}
    for option in weighing.options:
        best[option.frame] = min(option.plain_seconds, best.get(option.frame, inf))

    def promise(frame: Frame) -> tuple[float, int]:
        return least[frame] + best.get(frame, least[frame] * _UNKNOWN), frame.placement.num_stages

    return sorted((frame for frame in least if _may_be_better(weighing, least[frame])), key=promise)


def _search(weighing: Weighing, searcher: Searcher, frame: Frame, seconds: float, seed: int) -> None:
    question = weighing.question
    extra = 0.0 if question.objective == "period" else frame.costs.optimizer_step
    noise = {} if question.jitter is None else {"noise": question.jitter, "quantile": question.quantile}

    def told(now: Progress) -> None:
        weighing.tell(f"searching {frame}", now.share, now.best + extra)

    try:
        result = searcher(
            ranks=question.ranks,
            microbatches=frame.microbatches,
            costs=frame.costs,
            placement=frame.placement,
            stages_per_rank=frame.stages_per_rank,
            memory_limit=question.memory_limit,
            objective=question.objective,
            seconds=max(seconds, 0.1),
            seed=seed,
            told=told,
            **noise,
        )
    except SearchError:  # no order fits in this frame, which its families have told already
        return
    weighing.missing |= set(result.missing)
    found = weighing.option("searched", frame, result.schedule, result.found_by)
    own = [option for option in weighing.options if option.frame == frame]
    if not any(option.plain_seconds <= found.plain_seconds and option.memory <= found.memory for option in own):
        weighing.options.append(found)
    if result.interrupted:  # the search keeps its best, and so do we
        raise KeyboardInterrupt
