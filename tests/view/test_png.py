"""Tests of PNG pictures."""

from __future__ import annotations

import sys
from io import BytesIO

import pytest
from PIL import Image

import penstock
from penstock import Kind, MissingExtraError, Timeline
from penstock.view.kinds import style_of
from penstock.view.marks import Box
from penstock.view.picture import picture
from penstock.view.png import SCALE, png
from tests.support.timelines import COSTS, timeline

WHITE = (255, 255, 255)


def opened(*timelines: Timeline) -> Image.Image:
    image = Image.open(BytesIO(png(timelines)))
    image.load()
    assert image.format == "PNG"
    return image.convert("RGB")


def rgb(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))


@pytest.mark.parametrize("family", ["1f1b", "zbv", "dualpipev"])
def test_it_is_the_picture_at_twice_the_size(family: str) -> None:
    shown = timeline(family)
    drawn = picture([shown])
    assert opened(shown).size == (SCALE * drawn.width, SCALE * drawn.height)


@pytest.mark.parametrize("family", ["1f1b", "zbv", "dualpipev"])
def test_every_box_has_its_colour_and_idle_time_is_white(family: str) -> None:
    shown = timeline(family)
    drawn, image = picture([shown]), opened(shown)
    boxes = [mark for group in drawn.groups for mark in group.marks if isinstance(mark, Box)]
    assert boxes
    for box in boxes:  # two pixels from the corner: inside the border, outside the number
        inside = SCALE * box.x + min(3, SCALE * box.width / 2), SCALE * box.y + min(3, SCALE * box.height / 2)
        assert image.getpixel((round(inside[0]), round(inside[1]))) == rgb(drawn.styles[box.style].fill)
    first = next(mark for mark in drawn.groups[2].marks if isinstance(mark, Box))
    waits = round(SCALE * (first.x - 3)), round(SCALE * (first.y + first.height / 2))
    assert shown.start[shown.is_compute].max() > 0
    assert image.getpixel(waits) == WHITE


def test_a_large_picture_is_drawn_too() -> None:
    schedule = penstock.build("interleaved-1f1b", ranks=16, microbatches=64, stages_per_rank=2)
    image = opened(penstock.simulate(schedule, COSTS))
    colours = image.getcolors(image.width * image.height)
    assert isinstance(colours, list)
    found = {colour for _, colour in colours}
    assert {rgb(style_of(kind).colour) for kind in (Kind.F, Kind.B)} <= found


def test_several_timelines_are_below_each_other() -> None:
    one, two = timeline("1f1b"), timeline("zbv")
    assert opened(one, two).height > max(opened(one).height, opened(two).height)


def test_a_picture_that_would_be_too_large_is_drawn_at_the_size_of_the_svg(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = timeline("1f1b")
    monkeypatch.setattr(sys.modules["penstock.view.png"], "MAX_PIXELS", 1000)
    assert opened(shown).width == picture([shown]).width


def test_names_in_any_script_are_drawn() -> None:
    named = penstock.build("1f1b", ranks=2, microbatches=2).renamed("流水线 <b>\x00")
    assert opened(penstock.simulate(named)).width > 0


def test_the_same_timeline_gives_the_same_bytes() -> None:
    assert png([timeline("zbv")]) == png([timeline("zbv")])


def test_without_pillow_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'penstock\[view\]'"):
        png([timeline("1f1b")])
