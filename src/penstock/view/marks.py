"""What a picture is made of: boxes, lines, areas and labels, each with the name of its style."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

__all__ = ["Area", "Box", "Group", "Label", "Line", "Mark", "Picture", "Style", "text_width"]


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
