"""Why the winner wins, and what would help most: every figure is computed again, none is guessed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from statistics import fmean
from typing import Any

from penstock.cost.costs import Costs, size_text
from penstock.errors import PlanError
from penstock.ir.schedule import Schedule
from penstock.planning.evaluation import Told, orders
from penstock.planning.live_memory import holdings
from penstock.planning.options import Option
from penstock.planning.partition import even
from penstock.planning.planner import Plan, answer
from penstock.planning.request import Question
from penstock.planning.robustness import shaken_seconds
from penstock.simulation.attribution import gaps
from penstock.simulation.simulator import simulate

__all__ = ["Explanation", "WhatIf", "explain"]

_MORE_MEMORY = 1.25
_SHARE_OF_TIME = 0.25  # of the seconds for searching, for each change that is planned again


@dataclass(frozen=True)
class WhatIf:
    """A change, and what the best would be then."""

    change: str
    seconds: float
    """Of the best with that change."""
    gain: float
    """The share of the winner's time that it would save; below 0 it would be slower."""
    best: str


@dataclass(frozen=True)
class Explanation:
    """Sentences on why the winner wins, and changes, the most helpful first."""

    why: tuple[str, ...]
    what_ifs: tuple[WhatIf, ...]


def explain(plan: Plan, told: Told | None = None) -> Explanation:
    """Look at the winner, and plan again for each change with a quarter of the time for searching."""
    found = sorted(_what_ifs(plan, told), key=lambda each: each.seconds)
    return Explanation(tuple(_why(plan)), tuple(found))


# --- why it wins -----------------------------------------------------------------------------------


def _why(plan: Plan) -> Iterator[str]:
    best, question = plan.best, plan.question
    idle = best.timeline.bubble(question.objective)
    busiest = max(best.timeline.busy)
    yield (
        f"{best} takes {best.seconds:.4g} s: its busiest rank computes for {busiest:.4g} s, and the mean rank "
        f"idles {idle:.1%} of the {question.objective}"
    )
    yield (
        f"no order of these stages and microbatches takes less than {best.bound.seconds:.4g} s "
        f"({best.bound.name}: {best.bound.because}), so at most {best.gap:.1%} is left for a better one"
    )
    if len(plan.options) > 1:
        yield _against(best, plan.options[1])
    yield from _memory(plan)
    if reasons := _reasons(best):
        yield f"its ranks wait for: {reasons}"
    yield from _against_even(plan)


def _against(best: Option, other: Option) -> str:
    more = other.seconds / best.seconds - 1 if best.seconds else 0.0
    ours, theirs = max(best.timeline.busy), max(other.timeline.busy)
    if abs(theirs - ours) <= 1e-3 * ours:
        why = "its busiest rank computes as long, so it idles more"
    elif theirs > ours:
        why = f"its busiest rank computes for {theirs:.4g} s instead of {ours:.4g} s"
    else:
        why = f"its busiest rank computes for {theirs:.4g} s only, but it idles more"
    return f"the next, {other}, takes {more:.2%} longer: {why}"


def _memory(plan: Plan) -> Iterator[str]:
    best, limit = plan.best, plan.question.memory_limit
    held = f"it holds {size_text(best.memory)}" + ("" if limit is None else f" of {size_text(limit)}")
    if len(plan.frontier) > 1:
        other = plan.frontier[1]
        more = other.seconds / best.seconds - 1 if best.seconds else 0.0
        held += f"; the fastest that holds less, {other}, "
        held += f"holds {size_text(other.memory)} and takes {more:.2%} longer"
    yield held
    if faster := [each for each in plan.too_large if each.bound < best.plain_seconds]:
        count = f"{len(faster)} of {len(plan.too_large)} orders that are too large might be faster"
        yield f"{count}; the smallest of them, {faster[0]}, holds {size_text(faster[0].memory)}"


def _reasons(best: Option) -> str:
    waits: dict[str, float] = defaultdict(float)
    for gap in gaps(best.timeline):
        waits[gap.reason] += gap.length
    total = sum(waits.values())
    ordered = sorted(waits.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in ordered[:4] if seconds > 0)


def _against_even(plan: Plan) -> Iterator[str]:
    """What the partition is worth: the same frame with as many layers on every stage."""
    frame, question = plan.best.frame, plan.question
    counts = even(len(question.model.layers), frame.placement.num_stages)
    if counts != frame.counts:
        seconds, name = _best_at(plan, question.model.costs(counts, frame.samples))
        more = seconds / plan.best.seconds - 1 if plan.best.seconds else 0.0
        yield f"with as many layers on every stage, {name} takes {seconds:.4g} s, {more:+.1%}"


# --- what would help -------------------------------------------------------------------------------


def _what_ifs(plan: Plan, told: Told | None) -> Iterator[WhatIf]:
    question, best = plan.question, plan.best
    for change, changed in _changes(plan):
        kept = changed.stages_per_rank == question.stages_per_rank
        try:
            again = answer(changed, told, plan.searcher)
        except PlanError:
            continue  # with other stages per rank nothing may fit
        frame = best.frame
        costs = changed.model.costs(frame.counts, frame.samples)
        as_it_is = _seconds(changed, best.schedule, costs) if kept else float("inf")
        seconds = min(again.best.seconds, as_it_is)
        name = str(again.best) if again.best.seconds < as_it_is else str(best)
        yield _what_if(best, change, seconds, name)
        if again.interrupted:
            return
    levelled = _levelled(best.frame.costs, best.frame.placement.num_stages)
    if levelled != best.frame.costs:
        yield _what_if(best, "layers that could be cut anywhere, into equal stages", *_best_at(plan, levelled))


def _changes(plan: Plan) -> Iterator[tuple[str, Question]]:
    question, legs = plan.question, plan.best.frame.stages_per_rank
    asked = replace(question, seconds=question.seconds * _SHARE_OF_TIME)
    common = question.model.common
    if question.memory_limit is not None:
        more = question.memory_limit * _MORE_MEMORY
        yield f"25 % more memory, {size_text(more)} a rank", replace(asked, memory_limit=more)
    if common.latency and not isinstance(common.latency, tuple):
        yield "half the latency", _with_common(asked, latency=common.latency / 2)
    if common.bandwidth is not None and not isinstance(common.bandwidth, tuple):
        yield "twice the bandwidth", _with_common(asked, bandwidth=common.bandwidth * 2)
    if common.launch_overhead:
        yield "half the launch overhead", _with_common(asked, launch_overhead=common.launch_overhead / 2)
    if question.stages_per_rank is None and question.ranks > 1:
        for other in (legs - 1, legs + 1):
            if other >= 1 and question.ranks * other <= len(question.model.layers):
                yield f"{other} instead of {legs} stages per rank", replace(asked, stages_per_rank=other)


def _with_common(question: Question, **changed: float) -> Question:
    values: dict[str, Any] = changed
    return replace(question, model=replace(question.model, common=replace(question.model.common, **values)))


def _what_if(best: Option, change: str, seconds: float, name: str) -> WhatIf:
    return WhatIf(change, seconds, 1 - seconds / best.seconds if best.seconds else 0.0, name)


def _best_at(plan: Plan, costs: Costs) -> tuple[float, str]:
    """The best at other costs for the winner's placement and microbatches: its own order, or a family."""
    frame, question, stages = plan.best.frame, plan.question, plan.best.schedule.num_stages
    known = {str(plan.best): plan.best.schedule}
    for name, schedule in orders(question.ranks, frame.microbatches, frame.stages_per_rank):
        peak = max(each.peak(costs, stages) for each in holdings(schedule))
        if schedule.placement == frame.placement and peak <= (question.memory_limit or inf):
            known[f"{name} ({frame})"] = schedule
    plain = {name: _simulated(question, schedule, costs) for name, schedule in known.items()}
    best = min(plain, key=lambda name: plain[name])
    return _seconds(question, known[best], costs), best


def _seconds(question: Question, schedule: Schedule, costs: Costs) -> float:
    """What an order takes at other costs."""
    if question.jitter is not None:
        return shaken_seconds(question, schedule, costs)
    return _simulated(question, schedule, costs)


def _simulated(question: Question, schedule: Schedule, costs: Costs) -> float:
    return question.seconds_of(simulate(schedule, costs, with_period=question.objective == "period"))


def _levelled(costs: Costs, stages: int) -> Costs:
    """The same work in all, shared equally by the stages."""
    names = ("forward", "backward_input", "backward_weight", "backward")
    means: dict[str, Any] = {
        name: tuple([fmean(costs.per_stage(name, stages))] * stages)
        for name in names
        if getattr(costs, name) is not None
    }
    return replace(costs, **means)
