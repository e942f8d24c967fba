"""A picture as SVG: one group per rank, one CSS class per style, plain rectangles and text.

The same timelines give the same bytes. Class names begin with `penstock-`, so that they do not collide with
the styles of a page that embeds the picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from xml.sax.saxutils import escape

from penstock.simulation.timeline import Timeline
from penstock.view.marks import Area, Box, Label, Line, Mark, Picture, Style
from penstock.view.picture import picture

FONT = "Helvetica,Arial,sans-serif"


def svg(timelines: Sequence[Timeline]) -> str:
    """The timelines below each other on one time axis, as a standalone SVG document."""
    return svg_of(picture(timelines))


def svg_of(drawn: Picture) -> str:
    """Any picture as a standalone SVG document."""
    size = f'width="{drawn.width}" height="{drawn.height}" viewBox="0 0 {drawn.width} {drawn.height}"'
    used = {mark.style for group in drawn.groups for mark in group.marks}
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONT}">',
        f"<title>{escape(drawn.title)}</title>",
        "<style>",
        *(f".penstock-{name}{{{_rule(style)}}}" for name, style in drawn.styles.items() if name in used),
        "</style>",
        f'<rect width="{drawn.width}" height="{drawn.height}" fill="#fff"/>',
    ]
    for group in drawn.groups:
        lines.append(f"<g><title>{escape(group.name)}</title>")
        for name, marks in groupby(group.marks, key=attrgetter("style")):
            lines.append(f'<g class="penstock-{name}">' + "".join(map(_element, marks)) + "</g>")
        lines.append("</g>")
    return "\n".join([*lines, "</svg>\n"])


def _rule(style: Style) -> str:
    if style.size:
        weight = ";font-weight:bold" if style.bold else ""
        return f"fill:{style.fill};font-size:{style.size}px;text-anchor:{style.anchor}{weight}"
    border = "" if style.stroke == "none" else f";stroke:{style.stroke};stroke-width:{style.stroke_width}"
    return f"fill:{style.fill}{border}"


def _element(mark: Mark) -> str:
    n = _number
    if isinstance(mark, Box):
        _, x, y, width, height = mark
        return f'<rect x="{n(x)}" y="{n(y)}" width="{n(width)}" height="{n(height)}"/>'
    if isinstance(mark, Label):
        return f'<text x="{n(mark.x)}" y="{n(mark.y)}">{escape(mark.text)}</text>'
    if isinstance(mark, Line):
        return f'<path d="M{n(mark.x)} {n(mark.y)}L{n(mark.to_x)} {n(mark.to_y)}"/>'
    return f'<path d="{_outline(mark)}"/>'


def _outline(area: Area) -> str:
    (x, y), *rest = area.points
    path = [f"M{_number(x)} {_number(y)}"]
    for to_x, to_y in rest:
        if to_x != x:
            path.append(f"H{_number(to_x)}")
        if to_y != y:
            path.append(f"V{_number(to_y)}")
        x, y = to_x, to_y
    return "".join(path) + "Z"


def _number(value: float) -> str:
    """To a hundredth of a pixel."""
    return format(round(value, 2), ".8g")
