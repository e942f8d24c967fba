"""What a picture is made of: boxes, lines, areas and labels, and the colours and styles they have.

The colours are those of Okabe and Ito, which colour-blind eyes tell apart. Grey printers leave their lightness
(0 black, 100 white):

    F  blue 46     I  purple 61     B  orange 71     W  yellow 89

Further stages of a rank are tints of the same colour, so within one stage the order of lightness stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from penstock.ir.action import Kind

__all__ = [
    "COLLECTIVES",
    "GREY",
    "KINDS",
    "MEMORY",
    "PALE",
    "PALEST",
    "Area",
    "Box",
    "Group",
    "Label",
    "Legend",
    "Line",
    "Mark",
    "Picture",
    "Style",
    "box_style",
    "legend",
    "letters_on",
    "lightness",
    "styles",
    "text_width",
    "tint",
]

# --- marks -----------------------------------------------------------------------------------------


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
    """A closed shape, each side along an axis."""

    style: str
    points: list[tuple[float, float]]


class Label(NamedTuple):
    """A text; `y` is its base line."""

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
    """How a mark looks: areas and letters have a fill, borders and lines a stroke, letters a size."""

    fill: str = "none"
    stroke: str = "none"
    stroke_width: float = 0
    size: float = 0
    anchor: str = "start"
    """The point of a text that stands at its place: `start`, `middle` or `end`."""
    bold: bool = False


class Picture(NamedTuple):
    """What there is to draw, from back to front."""

    title: str
    width: int
    height: int
    styles: dict[str, Style]
    groups: list[Group]


# --- colours ---------------------------------------------------------------------------------------

BLACK, GREY, PALE, WHITE = "#1a1a1a", "#666666", "#e2e2e2", "#ffffff"

KINDS = {
    Kind.F: ("#0072b2", "forward"),
    Kind.B: ("#e69f00", "backward"),
    Kind.I: ("#cc79a7", "input gradient"),
    Kind.W: ("#f0e442", "weight gradient"),
}
"""The colour and the meaning of each kind of compute, in the order of the legend."""

COLLECTIVES = {
    Kind.UNSHARD: ("#009e73", "unshard"),
    Kind.RESHARD: ("#56b4e9", "reshard"),
    Kind.REDUCE_GRAD: ("#d55e00", "reduce gradients"),
}

MEMORY = {"fixed": "#9a9a9a", "unsharded": "#bcbcbc", "activations": "#d9d9d9"}
"""What a rank holds, from the bottom of its strip to the top."""

PALEST = 0.55
"""How much white is in the last stage of a rank."""

_LETTERS = {
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
}


def styles(stages_per_rank: int) -> dict[str, Style]:
    """Every style by its name, with a tint for each stage of a rank."""
    found = {**_LETTERS, **_LINES, **{part: Style(colour) for part, colour in MEMORY.items()}}
    found |= {str(kind): Style(colour) for kind, (colour, _) in COLLECTIVES.items()}
    for kind, (colour, _) in KINDS.items():
        border = _mix(colour, "#000000", 0.45)
        for nth in range(stages_per_rank):
            fill = tint(colour, PALEST * nth / max(stages_per_rank - 1, 1))
            found[box_style(kind, nth)] = Style(fill, border, 0.5)
            found[box_style(kind, nth, narrow=True)] = Style(fill)
    return found


def box_style(kind: Kind, nth: int, *, narrow: bool = False) -> str:
    """The name of the style of a step on the `nth` stage of its rank; a narrow box has no border."""
    return f"{kind.value}{nth}{'-narrow' if narrow else ''}"


def letters_on(box: Style, letters: str) -> str:
    """The name of the style of letters that can be read on this box."""
    return letters if lightness(box.fill) > 50 else f"{letters}-on-dark"


def text_width(text: str, size: float) -> float:
    """About how many pixels a text takes in any sans-serif font."""
    widths = (
        1.0 if ord(c) > 0x1100 else 0.3 if c in " .,:·()Iijlftr" else 0.85 if c in "mwMW" else 0.58
        for c in text
    )
    return size * sum(widths)


def tint(colour: str, white: float) -> str:
    """The colour with this share of white in it."""
    return _mix(colour, WHITE, white)


def lightness(colour: str) -> float:
    """What is left of a colour in grey: CIE L*, from 0 (black) to 100 (white)."""
    linear = [((c + 0.055) / 1.055) ** 2.4 if c > 0.04045 else c / 12.92 for c in _rgb(colour)]
    y: float = sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear))
    return float(116 * y ** (1 / 3) - 16 if y > 0.008856 else 903.3 * y)


def _rgb(colour: str) -> tuple[float, ...]:
    return tuple(int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))


def _mix(colour: str, other: str, share: float) -> str:
    mixed = ((1 - share) * a + share * b for a, b in zip(_rgb(colour), _rgb(other)))
    return "#" + "".join(f"{round(255 * c):02x}" for c in mixed)


# --- the legend ------------------------------------------------------------------------------------


class Legend(NamedTuple):
    """What there is to explain."""

    kinds: list[Kind]
    stages_per_rank: int
    pairs: bool
    memory: list[str]


def legend(shown: Legend, left: int, width: int, top: int) -> tuple[Group, int]:
    """The signs and their meanings in as many lines as it takes, and where they end."""
    marks: list[Mark] = []
    x, y = float(left), top
    for boxes, meaning in _entries(shown):
        wide = max(box.x + box.width for box in boxes) + 5 + text_width(meaning, 10)
        if x > left and x + wide > left + width:
            x, y = float(left), y + 18
        marks += [box._replace(x=round(x + box.x, 2), y=y - 9 + box.y) for box in boxes]
        marks.append(Label("key", round(x + max(b.x + b.width for b in boxes) + 5, 2), y, meaning))
        x += wide + 14
    return Group("legend", marks), y + 4


def _entries(shown: Legend) -> Iterator[tuple[list[Box], str]]:
    """Boxes around (0, 0), and what they mean."""
    kinds = [kind for kind in KINDS if kind in shown.kinds]
    for kind in kinds:
        yield [Box(box_style(kind, 0), 0, 0, 16, 11)], f"{kind}: {KINDS[kind][1]}"
    if shown.pairs:
        lower = Kind.B if Kind.B in kinds else Kind.I
        halves = [Box(box_style(kind, 0), 0, 5.5 * n, 16, 5.5) for n, kind in enumerate((Kind.F, lower))]
        yield halves, "overlapped pair"
    if kinds and shown.stages_per_rank > 1:
        tints = [Box(box_style(kinds[0], n), 12 * n, 0, 12, 11) for n in range(shown.stages_per_rank)]
        yield tints, "first to last stage of a rank"
    for kind in COLLECTIVES:
        if kind in shown.kinds:
            yield [Box(kind.value, 0, 4, 6, 4)], COLLECTIVES[kind][1]
    for part in shown.memory:
        yield [Box(part, 0, 0, 16, 11)], f"memory: {part}"
