"""A picture as PNG, drawn by Pillow at twice the size of the SVG.

The font is Pillow's own, so that the same timelines give the same picture on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from io import BytesIO
from typing import TYPE_CHECKING

from penstock.arguments import install_command
from penstock.errors import MissingExtraError
from penstock.simulation.timeline import Timeline
from penstock.view.marks import Box, Label, Line, Mark, Picture, Style
from penstock.view.picture import picture

if TYPE_CHECKING:  # Pillow is an extra
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont, ImageFont


SCALE = 2
MAX_PIXELS = 100_000_000
"""A picture that would have more is drawn at the size of the SVG instead."""

_ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}


def png(timelines: Sequence[Timeline]) -> bytes:
    """The timelines below each other on one time axis, as the bytes of a PNG file."""
    return png_of(picture(timelines))


def require_pillow() -> None:
    """Raise if Pillow is not installed, which is an extra."""
    try:
        import PIL.Image  # noqa: F401, PLC0415 -- an extra
    except ImportError:
        raise MissingExtraError(
            f"PNG pictures are drawn by Pillow, which is not installed: {install_command('view')} "
            "(SVG pictures need nothing)"
        ) from None


def png_of(drawn: Picture) -> bytes:
    """Any picture as the bytes of a PNG file."""
    require_pillow()
    from PIL import Image, ImageDraw  # noqa: PLC0415 -- an extra

    scale = SCALE if drawn.width * drawn.height * SCALE**2 <= MAX_PIXELS else 1
    image = Image.new("RGB", (drawn.width * scale, drawn.height * scale), "#ffffff")
    canvas = _Canvas(ImageDraw.Draw(image), drawn, scale)
    for group in drawn.groups:
        for mark in group.marks:
            canvas.draw(mark)
    file = BytesIO()
    image.save(file, "PNG", dpi=(96 * scale, 96 * scale))
    return file.getvalue()


class _Canvas:
    def __init__(self, image: ImageDraw, drawn: Picture, scale: int) -> None:
        self.image, self.styles, self.scale = image, drawn.styles, scale

    def draw(self, mark: Mark) -> None:
        style = self.styles[mark.style]
        if isinstance(mark, Box):
            self._box(mark, style)
        elif isinstance(mark, Label):
            self._label(mark, style)
        elif isinstance(mark, Line):
            ends = [(self._px(mark.x), self._px(mark.y)), (self._px(mark.to_x), self._px(mark.to_y))]
            self.image.line(ends, fill=style.stroke, width=max(round(style.stroke_width * self.scale), 1))
        else:
            self.image.polygon([(self._px(x), self._px(y)) for x, y in mark.points], fill=style.fill)

    def _px(self, value: float) -> int:
        return round(value * self.scale)

    def _box(self, box: Box, style: Style) -> None:
        """Adjacent boxes share the pixel of their border."""
        left, top, right, bottom = (self._px(v) for v in (box.x, box.y, box.x + box.width, box.y + box.height))
        outline = None if style.stroke == "none" else style.stroke
        if outline is None:
            right, bottom = max(right - 1, left), max(bottom - 1, top)
        self.image.rectangle((left, top, right, bottom), fill=style.fill, outline=outline)

    def _label(self, label: Label, style: Style) -> None:
        font = _font(style.size * self.scale)
        x, y, anchor = self._px(label.x), self._px(label.y), _ANCHORS[style.anchor]
        for shift in range(self.scale if style.bold else 1):
            self.image.text((x + shift / 2, y), label.text, fill=style.fill, font=font, anchor=anchor)


@cache
def _font(size: float) -> FreeTypeFont | ImageFont:
    from PIL import ImageFont  # noqa: PLC0415 -- an extra

    return ImageFont.load_default(size)
