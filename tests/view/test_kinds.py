"""Tests that every kind of action has a style in every view, and that a kind without one is an error."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

import penstock
from penstock import Kind, Timeline, UnhandledKindError
from penstock.view import grid, terminal
from penstock.view.html import drawing_script, html, style_sheet
from penstock.view.kinds import HOST_TRACKS, KIND_STYLES, kinds_on, style_of
from penstock.view.perfetto import trace
from penstock.view.png import png
from penstock.view.svg import svg

LOWERED = penstock.simulate(penstock.lower(penstock.build("1f1b", ranks=2, microbatches=2)))
VIEWS: dict[str, Callable[[Timeline], object]] = {
    "grid": lambda timeline: grid(timeline.schedule),
    "terminal": terminal,
    "svg": lambda timeline: svg([timeline]),
    "png": lambda timeline: png([timeline]),
    "html": lambda timeline: html([timeline]),
    "trace": lambda timeline: trace([timeline]),
}


def test_every_kind_has_a_style() -> None:
    assert set(KIND_STYLES) == set(Kind)
    for kind in Kind:
        track = "compute" if kind.is_compute else "message" if kind.is_point else "collective"
        assert style_of(kind).track == (kind.value.lower() if kind.is_host_copy else track)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("kind", [Kind.F, Kind.RECV_F, Kind.REDUCE_GRAD])
def test_a_kind_without_a_style_is_an_error_that_names_it(view: str, kind: Kind) -> None:
    if view == "terminal" and not kind.is_compute:
        pytest.skip("the terminal draws compute only")
    styles = dict(KIND_STYLES)
    del KIND_STYLES[kind]
    try:
        with pytest.raises(UnhandledKindError, match=f"does not handle actions of kind {kind}"):
            VIEWS[view](LOWERED)
    finally:  # in the order of the legend
        KIND_STYLES.clear()
        KIND_STYLES.update(styles)


def test_the_page_has_the_colours_and_words_of_pictures_for_every_kind() -> None:
    look = json.loads(drawing_script().splitlines()[2].removeprefix("const LOOK = ").removesuffix(";"))
    assert look["kinds"] == [kind.value for kind in Kind]
    for kind in Kind:
        assert look["meaning"][kind.value] == style_of(kind).meaning
    marks = (kind for track in ("collective", *HOST_TRACKS) for kind in kinds_on(track))
    for kind in (*kinds_on("compute"), *marks):
        assert f"--{kind}: {style_of(kind).colour};" in style_sheet()  # as in SVG and PNG
