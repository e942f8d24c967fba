"""Timelines as one self-contained HTML page: zoom, pan, hover, keyboard, dark and light.

The page is the template `page/page.html` with style, scripts and data inserted. The data is JSON
(`penstock.view.html`); the scripts draw it.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from html import escape
from importlib.resources import files
from string import Template
from typing import TypeAlias

import numpy as np

from penstock.cost.memory import Memory
from penstock.cost.prices import all_to_all_seconds, exposed_all_to_all
from penstock.cost.units import Units
from penstock.ir.encoding import Bools, Floats, Ints
from penstock.ir.kinds import Kind
from penstock.simulation.gaps import REASONS, Gaps, critical_path, gaps
from penstock.simulation.timeline import Timeline
from penstock.view.kinds import KIND_STYLES, NUMBER, STAGES, cost_text, sizes_text, title_text
from penstock.view.marks import PALEST

# A timeline as the JSON record that the page draws, in columns, which the browser parses fast.
#
#     steps      compute steps, collectives, and sends and receives that blocked their rank
#     pairs      the second halves of overlapped steps
#     messages   values between ranks         needs   values within a rank
#     gaps       idle gaps with their causes  path    the steps of the critical path
#     memory     per rank, one entry per change
#
# Step numbers count the drawn steps, not the slots of the schedule. -1 means "none".


Record: TypeAlias = dict[str, object]


def timeline_record(timeline: Timeline, *, explained: bool = True) -> Record:
    """The columns of one timeline; `explained`: with gaps, critical path and memory of a valid schedule."""
    schedule = timeline.schedule
    schedule.table.require_handled(KIND_STYLES, "view.timeline_record")
    shown = _shown(timeline)
    number = np.where(shown, np.cumsum(shown) - 1, -1)
    found = gaps(timeline) if explained else Gaps.none(timeline)
    path = [event.slot for event in critical_path(timeline)] if explained else []
    used, use = timeline.further_uses  # values that crossed once for several stages of a rank
    return {
        "name": schedule.name,
        "sizes_text": sizes_text(schedule) + cost_text(timeline),
        "ranks": schedule.num_ranks,
        "stages": schedule.num_stages,
        "microbatches": schedule.microbatches,
        "stages_of_rank": [list(stages) for stages in schedule.placement.stages_of_rank],
        "makespan": timeline.makespan,
        "span": timeline.span,
        "period": timeline.period,
        "bubble": timeline.bubble_rate,
        "bounds": np.concatenate(([0], np.cumsum(shown)))[schedule.table.slot_bounds].tolist(),
        "steps": _steps(timeline, shown),
        "pairs": _pairs(timeline, number),
        "messages": _messages(timeline, number),
        "further_uses": {"message": used.tolist(), "consumer": number[use].tolist()},
        "needs": _needs(timeline, number),
        "path": [n for n in number[path].tolist() if n >= 0],
        "gaps": _gaps(found, number),
        "memory": [_memory(memory) for memory in timeline.memory] if explained else [],
    }


def _shown(timeline: Timeline) -> Bools:
    """Per slot: whether it is drawn as a step. Messages and waits are not, unless they took time."""
    table = timeline.schedule.table
    shown = timeline.end > timeline.start
    shown[table.slot[~table.is_point]] = True
    return shown


def _steps(timeline: Timeline, shown: Bools) -> Record:
    table = timeline.schedule.table
    kind, stage, microbatch = (np.zeros(len(shown), dtype=np.int64) for _ in range(3))
    first, second = _halves(timeline)
    for column, per_part in ((kind, table.kind), (stage, table.stage), (microbatch, table.microbatch)):
        column[table.slot[first]] = per_part[first]
    kind[table.slot[second]] = Kind.OVERLAP_F_B.number
    streams = [prices(table, timeline.costs) for prices in (all_to_all_seconds, exposed_all_to_all)]
    all_to_all, exposed = (_numbers(each[shown]) if streams[0].any() else [] for each in streams)
    return {
        "kind": kind[shown].tolist(),
        "stage": stage[shown].tolist(),
        "microbatch": microbatch[shown].tolist(),
        "start": _numbers(timeline.start[shown]),
        "end": _numbers(timeline.end[shown]),
        "all_to_all": all_to_all,
        "exposed": exposed,
    }


def _pairs(timeline: Timeline, number: Ints) -> Record:
    table = timeline.schedule.table
    _, second = _halves(timeline)
    return {
        "step": number[table.slot[second]].tolist(),
        "kind": table.kind[second].tolist(),
        "stage": table.stage[second].tolist(),
        "microbatch": table.microbatch[second].tolist(),
    }


def _halves(timeline: Timeline) -> tuple[Ints, Ints]:
    """The first parts of all steps, and the second parts of overlapped steps."""
    slot = timeline.schedule.table.slot
    opens = np.diff(slot, prepend=-1) > 0
    return np.flatnonzero(opens), np.flatnonzero(~opens)


def _messages(timeline: Timeline, number: Ints) -> Record:
    columns = timeline.message_columns
    return {
        "gradient": columns["kind"].astype(int).tolist(),
        "stage": columns["stage"].tolist(),
        "microbatch": columns["microbatch"].tolist(),
        "producer": number[columns["producer"]].tolist(),
        "consumer": number[columns["consumer"]].tolist(),
        "begin": _numbers(columns["begin"]),
        "arrival": _numbers(columns["arrival"]),
        "size": _numbers(columns["size"]),
    }


def _needs(timeline: Timeline, number: Ints) -> Record:
    """Dependencies within a rank: within a stage, and between stages of the same rank."""
    table = timeline.schedule.table
    all_needs = (*table.within_stage, *table.between_stages)
    producer, consumer = (
        table.slots_of(np.concatenate([getattr(need, side).ravel() for need in all_needs]))
        for side in ("producer", "consumer")
    )
    present = (producer >= 0) & (consumer >= 0) & (producer != consumer)
    producer, consumer = producer[present], consumer[present]
    local = table.rank[producer] == table.rank[consumer]
    return {"producer": number[producer[local]].tolist(), "consumer": number[consumer[local]].tolist()}


def _gaps(found: Gaps, number: Ints) -> Record:
    drawn = np.append(number, -1)
    return {
        "rank": found.rank.tolist(),
        "start": _numbers(found.start),
        "end": _numbers(found.end),
        "reason": [REASONS[reason] for reason in found.reason.tolist()],
        "before": drawn[found.next_slot].tolist(),
        "blame": drawn[found.cause].tolist(),
        "message": found.message.tolist(),
    }


def _memory(memory: Memory) -> Record:
    """The changes only; several changes at one instant are separate entries."""
    changes = np.diff(memory.total, prepend=memory.fixed) != 0
    return {
        "fixed": memory.fixed,
        "peak": memory.peak,
        "times": _numbers(memory.times[changes]),
        "total": _numbers(memory.total[changes]),
    }


def _numbers(values: Floats) -> list[float]:
    """The same numbers, integers without `.0`."""
    whole = values == np.floor(values)
    if whole.all():
        integers: list[float] = values.astype(np.int64).tolist()
        return integers
    return [int(value) if value.is_integer() else value for value in values.tolist()]


_SCRIPTS = (
    "data texts view colours boxes strips memory overlay axis card pointer legend svg_context export keys page"
)
"""The body of the function that draws, in this order."""
_START = 'drawTimelines(JSON.parse(document.getElementById("data").textContent), {});'


def html(timelines: Sequence[Timeline], title: str | None = None, head: str = "") -> str:
    """One page with a panel per timeline, on one time axis; the title names the schedules unless given.

    `head` is HTML that is shown above the timelines.
    """
    style, script = style_sheet(), f"{drawing_script()}\n{_START}\n"
    data = json.dumps(page_data(timelines), separators=(",", ":"), allow_nan=False)
    for sign in "<>&":  # special in HTML; in JSON they occur only inside strings
        data = data.replace(sign, f"\\u{ord(sign):04x}")
    return Template(_asset("page.html")).substitute(
        title=ascii_html(title_text(timelines) if title is None else title),
        policy=f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        "base-uri 'none'; form-action 'none'",
        head=head,
        style=style,
        script=script,
        data=data,
    )


def ascii_html(text: str) -> str:
    """Return a text escaped for HTML in ASCII."""
    return escape(text).encode("ascii", "xmlcharrefreplace").decode()


def page_data(timelines: Sequence[Timeline], *, explained: bool = True) -> Record:
    """What the drawing function draws; `explained`: with gaps, critical path and memory of a valid schedule."""
    units = Units.common(timeline.costs.units for timeline in timelines)
    return {
        "kinds": [kind.value for kind in Kind],
        "time_unit": units.time_name,
        "memory_unit": units.memory_name,
        "timelines": [timeline_record(timeline, explained=explained) for timeline in timelines],
    }


def drawing_script() -> str:
    """The function `drawTimelines(data, host)`: the HTML view calls it once, the playground per answer."""
    look = {
        "kinds": [kind.value for kind in Kind],
        "tracks": {kind.value: style.track for kind, style in KIND_STYLES.items()},
        "short": {kind.value: style.short or kind.value for kind, style in KIND_STYLES.items()},
        "meaning": {kind.value: style.meaning for kind, style in KIND_STYLES.items()},
        "palest": PALEST,
        "words": {"stages": STAGES, "number": NUMBER},
    }
    body = "\n".join(_asset(f"{name}.js") for name in _SCRIPTS.split())
    return f'function drawTimelines(data, host) {{\n"use strict";\nconst LOOK = {json.dumps(look)};\n{body}}}'


def style_sheet() -> str:
    """The style of what is drawn, with the colours of all kinds in both themes, and of a page around it."""
    light = "".join(f"--{kind}: {style.colour};" for kind, style in KIND_STYLES.items() if style.colour)
    dark = "".join(f"--{kind}: {style.dark};" for kind, style in KIND_STYLES.items() if style.dark)
    return f'{_asset("page.css")}\n:root {{{light}}}\n:root[data-theme="dark"] {{{dark}}}\n'


def _asset(name: str) -> str:
    return files("penstock.view").joinpath("page", name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """The hash by which a Content-Security-Policy allows an inline script or style."""
    return "sha256-" + b64encode(sha256(text.encode()).digest()).decode()
