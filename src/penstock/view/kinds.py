"""How views show each kind of action, and the words that all pictures share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

from penstock.arguments import plural, printable, some
from penstock.ir.kinds import Kind, handler_of
from penstock.ir.schedule import Schedule
from penstock.simulation.timeline import Timeline

Track = Literal["compute", "message", "collective", "offload", "reload"]

TRACKS: tuple[Track, ...] = get_args(Track)
"""From top to bottom."""
HOST_TRACKS: tuple[Track, ...] = ("offload", "reload")
"""The two directions of the host link."""


class KindStyle(NamedTuple):
    """How one kind of action is shown."""

    track: Track
    """The track of a rank on which it is drawn."""
    meaning: str
    """Its entry in the legend."""
    terminal: str = ""
    """Its style on a terminal, as rich writes it."""
    colour: str = ""
    """Its colour in SVG and PNG; empty if it has no box of its own there."""
    units: int = 0
    """Its length in pictures without costs."""
    short: str = ""
    """Its name in a cell of a grid; its text unless given."""
    dark: str = ""
    """Its colour on a dark page, unless `colour` is readable there."""


KIND_STYLES = {
    Kind.F: KindStyle("compute", "forward", "black on bright_blue", "#0072b2", 1),
    Kind.B: KindStyle("compute", "backward", "black on dark_orange", "#e69f00", 2),
    Kind.I: KindStyle("compute", "input gradient", "black on bright_magenta", "#cc79a7", 1),
    Kind.W: KindStyle("compute", "weight gradient", "black on bright_yellow", "#f0e442", 1),
    Kind.RECOMPUTE: KindStyle(
        "compute", "recompute forward", "white on dark_green", "#00483a", 1, "R", "#2f8f7a"
    ),
    Kind.OVERLAP_F_B: KindStyle("compute", "overlapped pair", "black on bright_cyan"),
    Kind.SEND_F: KindStyle("message", "send activation"),
    Kind.RECV_F: KindStyle("message", "receive activation"),
    Kind.SEND_B: KindStyle("message", "send gradient"),
    Kind.RECV_B: KindStyle("message", "receive gradient"),
    Kind.WAIT_SEND_F: KindStyle("message", "wait for the send of an activation"),
    Kind.WAIT_SEND_B: KindStyle("message", "wait for the send of a gradient"),
    Kind.UNSHARD: KindStyle("collective", "unshard parameters", "dim", "#009e73"),
    Kind.RESHARD: KindStyle("collective", "reshard parameters", "dim", "#56b4e9"),
    Kind.REDUCE_GRAD: KindStyle("collective", "reduce gradients", "bold", "#d55e00"),
    Kind.WAIT_REDUCE_GRAD: KindStyle("message", "wait for the reduction of gradients"),
    Kind.OFFLOAD: KindStyle("offload", "offload to the host", "dim", "#8a4b00", dark="#d9a05b"),
    Kind.RELOAD: KindStyle("reload", "reload from the host", "dim", "#004c77", dark="#7cb7e8"),
}
"""In the order of the legend."""


def style_of(kind: Kind) -> KindStyle:
    """How a kind is shown; `UnhandledKindError` for a kind without a style."""
    return handler_of(KIND_STYLES, kind, "view.kinds")


def kinds_on(*tracks: Track) -> list[Kind]:
    """Return the kinds of these tracks that have a colour, in the order of the legend."""
    return [kind for kind, style in KIND_STYLES.items() if style.track in tracks and style.colour]


STAGES = "first to last stage of a rank"
"""What the shades of a colour are."""
NUMBER = "number in a box: microbatch"


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
