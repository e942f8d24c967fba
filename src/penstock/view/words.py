"""The words that all pictures share: the sizes of a schedule, and the title of a picture."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.arguments import plural, printable, some
from penstock.ir.schedule import Schedule
from penstock.simulation.timeline import Timeline

__all__ = ["cost_text", "sizes_text", "stage_unit_text", "title_text"]


def sizes_text(schedule: Schedule) -> str:
    """Ranks, microbatches and stages per rank."""
    stages = plural(_stages_per_rank(schedule), "stage")
    return f"{_ranks(schedule.num_ranks, schedule.microbatches)}, {stages} per rank"


def _stages_per_rank(schedule: Schedule) -> str:
    counts = sorted({len(stages) for stages in schedule.placement.stages_of_rank})
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def cost_text(timeline: Timeline) -> str:
    """What F of a stage takes where that is not one unit, as when the stages of a rank share unit costs."""
    costs = timeline.costs
    if costs.units.seconds or isinstance(costs.forward, tuple) or costs.forward == 1:
        return ""
    return f", F of a stage takes {costs.units.time(costs.forward)}"


def stage_unit_text(schedule: Schedule) -> str:
    """What unit costs of each stage mean where ranks have several: more work than with one stage per rank."""
    if schedule.num_stages == schedule.num_ranks:
        return ""
    return f"units are per stage, a rank has {_stages_per_rank(schedule)}: penstock compare gives equal work"


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
    return f"{plural(ranks, 'rank')}, {plural(microbatches, 'microbatch')}"
