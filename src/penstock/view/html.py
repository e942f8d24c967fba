"""Timelines as one self-contained HTML page: zoom, pan, hover, keyboard, dark and light.

The page is the template `page/page.html` with style, scripts and data inserted. The data is JSON
(`penstock.view.timeline_record`); the scripts draw it.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from html import escape
from importlib.resources import files
from string import Template

from penstock.cost.units import Units
from penstock.ir.action import Kind
from penstock.simulation.timeline import Timeline
from penstock.view.kinds import KIND_STYLES
from penstock.view.legend import NUMBER, STAGES
from penstock.view.palette import PALEST
from penstock.view.timeline_record import Record, timeline_record
from penstock.view.words import title_text

__all__ = ["drawing_script", "html", "page_data", "style_sheet"]

_SCRIPTS = (
    *(
        "data.js",
        "texts.js",
        "view.js",
        "colours.js",
        "boxes.js",
        "strips.js",
        "memory.js",
        "overlay.js",
        "axis.js",
    ),
    *("card.js", "pointer.js", "legend.js", "svg_context.js", "export.js", "keys.js", "page.js"),
)
"""The body of the function that draws, in this order."""
_START = 'drawTimelines(JSON.parse(document.getElementById("data").textContent), {});'


def html(timelines: Sequence[Timeline], title: str | None = None, head: str = "") -> str:
    """One page with a panel per timeline, on one time axis; the title names the schedules unless given.

    `head` is HTML that is shown above the timelines.
    """
    page, style = _asset("page.html"), style_sheet()
    script = f"{drawing_script()}\n{_START}\n"
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return Template(page).substitute(
        title=escape(title_text(timelines) if title is None else title)
        .encode("ascii", "xmlcharrefreplace")
        .decode(),
        policy=policy,
        head=head,
        style=style,
        script=script,
        data=_safe_json(page_data(timelines)),
    )


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
    body = "\n".join(map(_asset, _SCRIPTS))
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


def _safe_json(data: Record) -> str:
    """ASCII JSON with the characters that are special in HTML escaped; they occur only inside strings."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text
