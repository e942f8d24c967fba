"""What a picture is made of: boxes, lines, areas and labels, and the colours and styles they have."""

from __future__ import annotations

from math import floor, log10
from typing import NamedTuple, TypeAlias

from penstock.ir.kinds import Kind
from penstock.view.kinds import HOST_TRACKS, kinds_on, style_of


class Box(NamedTuple):
    """A rectangle."""

    style: str
    x: float
    y: float
    width: float
    height: float


class Line(NamedTuple):
    """A straight line."""

    style: str
    x: float
    y: float
    to_x: float
    to_y: float


class Area(NamedTuple):
    """A closed polygon of horizontal and vertical edges."""

    style: str
    points: list[tuple[float, float]]


class Label(NamedTuple):
    """A text; `y` is its baseline."""

    style: str
    x: float
    y: float
    text: str


Mark: TypeAlias = Box | Line | Area | Label


class Group(NamedTuple):
    """Marks that belong together, from back to front."""

    name: str
    marks: list[Mark]


class Style(NamedTuple):
    """How a mark looks: areas and text have a fill, borders and lines a stroke, text a size."""

    fill: str = "none"
    stroke: str = "none"
    stroke_width: float = 0
    size: float = 0
    anchor: str = "start"
    """The point of a text that is at its coordinates: `start`, `middle` or `end`."""
    bold: bool = False


class Picture(NamedTuple):
    """Everything to draw, from back to front."""

    title: str
    width: int
    height: int
    styles: dict[str, Style]
    groups: list[Group]


def text_width(text: str, size: float) -> float:
    """The approximate width of a text in pixels in any sans-serif font."""
    widths = (
        1.0 if ord(c) > 0x1100 else 0.3 if c in " .,:·()Iijlftr" else 0.85 if c in "mwMW" else 0.58
        for c in text
    )
    return size * sum(widths)


def round_step(least: float) -> float:
    """The smallest 1, 2 or 5 times a power of ten that is at least this."""
    power = 10.0 ** floor(log10(least))
    return next(n * power for n in (1, 2, 5, 10) if n * power >= least)


# The colours of SVG and PNG pictures, and the styles made of them.
#
# The colours are Okabe and Ito's, which colour-blind readers can distinguish. In greyscale they keep their
# lightness (0 black, 100 white):
#
#     RECOMPUTE  green 27     F  blue 46     I  purple 61     B  orange 71     W  yellow 89
#
# Further stages of a rank are tints of the same colour, so within one stage the order of lightness is kept.


BLACK, GREY, PALE, WHITE = "#1a1a1a", "#666666", "#e2e2e2", "#ffffff"

MEMORY = {
    "fixed": "#9a9a9a",
    "unsharded": "#bcbcbc",
    "activations": "#d9d9d9",
    "receive_buffers": "#ececec",
    "send_buffers": "#f6f6f6",
}
"""The parts of the memory strip, from bottom to top."""

PALEST = 0.55
"""The share of white in the colour of the last stage of a rank."""

_TEXT = {
    "name": Style(BLACK, size=13, bold=True),
    "facts": Style(BLACK, size=11, anchor="end"),
    "rank": Style(BLACK, size=11, anchor="end"),
    "peak": Style(GREY, size=10),
    "tick": Style(GREY, size=10, anchor="middle"),
    "key": Style(BLACK, size=10),
    "number": Style(BLACK, size=10, anchor="middle"),
    "number-on-dark": Style(WHITE, size=10, anchor="middle"),
    "half": Style(BLACK, size=9, anchor="middle"),
    "half-on-dark": Style(WHITE, size=9, anchor="middle"),
}
_LINES = {
    "grid": Style(stroke=PALE, stroke_width=0.5),
    "axis": Style(stroke=GREY, stroke_width=0.75),
    "at-peak": Style(stroke=GREY, stroke_width=1),
    "edge-activation": Style("#004c77", "#004c77", 1),
    "edge-gradient": Style("#8a4b00", "#8a4b00", 1),
}


def styles(stages_per_rank: int) -> dict[str, Style]:
    """Every style by name, with a tint for each stage of a rank."""
    found = {
        **_TEXT,
        **_LINES,
        "all-to-all": Style("#a3260f"),
        **{part: Style(colour) for part, colour in MEMORY.items()},
    }
    found |= {str(kind): Style(style_of(kind).colour) for kind in kinds_on("collective", *HOST_TRACKS)}
    for kind in kinds_on("compute"):
        colour = style_of(kind).colour
        border = _mix(colour, "#000000", 0.45)
        for nth in range(stages_per_rank):
            fill = tint(colour, PALEST * nth / max(stages_per_rank - 1, 1))
            found[box_style(kind, nth)] = Style(fill, border, 0.5)
            found[box_style(kind, nth, narrow=True)] = Style(fill)
    return found


def box_style(kind: Kind, nth: int, *, narrow: bool = False) -> str:
    """The name of the style of a step on the `nth` stage of its rank; a narrow box has no border."""
    return f"{kind.value}{nth}{'-narrow' if narrow else ''}"


def text_on(box: Style, style: str) -> str:
    """The name of the text style that is readable on this box."""
    return style if lightness(box.fill) > 50 else f"{style}-on-dark"


def tint(colour: str, white: float) -> str:
    """The colour mixed with this share of white."""
    return _mix(colour, WHITE, white)


def lightness(colour: str) -> float:
    """CIE L* of a colour, from 0 (black) to 100 (white)."""
    linear = [((c + 0.055) / 1.055) ** 2.4 if c > 0.04045 else c / 12.92 for c in _rgb(colour)]
    y: float = sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear))
    return float(116 * y ** (1 / 3) - 16 if y > 0.008856 else 903.3 * y)


def _rgb(colour: str) -> tuple[float, ...]:
    return tuple(int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))


def _mix(colour: str, other: str, share: float) -> str:
    mixed = ((1 - share) * a + share * b for a, b in zip(_rgb(colour), _rgb(other)))
    return "#" + "".join(f"{round(255 * c):02x}" for c in mixed)
