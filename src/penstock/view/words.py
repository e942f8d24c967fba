"""The words that all pictures share: the sizes of a schedule, and the title of a picture."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.arguments import plural, printable, some
from penstock.ir.schedule import Schedule
from penstock.simulation.timeline import Timeline

__all__ = ["cost_text", "sizes_text", "title_text"]


def sizes_text(schedule: Schedule) -> str:
    """Ranks, microbatches and stages per rank."""
    counts = sorted({len(stages) for stages in schedule.placement.stages_of_rank})
    stages = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{_ranks(schedule.num_ranks, schedule.microbatches)}, {plural(stages, 'stage')} per rank"


def cost_text(timeline: Timeline) -> str:
    """What F of a stage takes where that is not one unit, as when the stages of a rank share unit costs."""
    costs = timeline.costs
    if costs.units.seconds or isinstance(costs.forward, tuple) or costs.forward == 1:
        return ""
    return f", F of a stage takes {costs.units.time(costs.forward)}"


def title_text(timelines: Sequence[Timeline]) -> str:
    """The schedules of a picture, with their sizes where all have the same."""
    names = some(list(dict.fromkeys(printable(timeline.schedule.name) for timeline in timelines)), 4)
    sizes = {(t.schedule.num_ranks, t.schedule.microbatches) for t in timelines}
    if not timelines:
        return "penstock"
    if len(timelines) == 1:
        return f"{names}: {sizes_text(timelines[0].schedule)}"
    if len(sizes) > 1:
        return names
    ((ranks, microbatches),) = sizes
    return f"{names}: {_ranks(ranks, microbatches)}"


def _ranks(ranks: int, microbatches: int) -> str:
    return f"{plural(ranks, 'rank')}, {plural(microbatches, 'microbatch', 'microbatches')}"
