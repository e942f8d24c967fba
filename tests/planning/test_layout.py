"""Promises of pipeline layouts: layers are distributed evenly, and the text of a layout can be parsed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PartitionError
from penstock.planning.layout import PipelineLayout, even_layout, layout_of_counts, parse_layout


def counts(layout: PipelineLayout) -> list[int]:
    return [len(stage.layers) for stage in layout]


ANY_LAYOUT = st.lists(st.integers(0, 6), min_size=1, max_size=9).filter(lambda some: 0 not in some[1:-1])


@given(ANY_LAYOUT)
def test_the_text_of_a_layout_means_that_layout(layers: list[int]) -> None:
    layout = layout_of_counts(layers)
    assert parse_layout(str(layout), layers=sum(layers), stages=len(layers)) == layout
    assert layout.layers == sum(layers)


def test_the_text_is_short() -> None:
    assert str(parse_layout("Ettt|tt|tt|t|L")) == "Et*3|(tt|)*2,t|L"
    assert repr(even_layout(30, 8)) == "PipelineLayout('Et*3|(t*4|)*6,t*3L')"


@given(st.integers(1, 60), st.integers(1, 20))
def test_an_even_layout_has_all_layers_and_differs_by_at_most_one(layers: int, stages: int) -> None:
    if stages > layers + 2:
        with pytest.raises(PartitionError, match=f"use at most {layers + 2} stages"):
            even_layout(layers, stages)
        return
    layout = even_layout(layers, stages)
    counted = counts(layout)
    assert (layout.layers, len(layout)) == (layers, stages)
    assert max(counted) - min(counted) <= 1
    assert counted[-1] == min(counted)
    assert parse_layout(str(layout), layers, stages) == layout


@pytest.mark.parametrize(
    ("layers", "stages", "counted"),
    [
        (30, 8, [3, 4, 4, 4, 4, 4, 4, 3]),
        (31, 8, [4, 4, 4, 4, 4, 4, 4, 3]),
        (9, 4, [2, 2, 3, 2]),
        (5, 2, [3, 2]),
        (2, 4, [0, 1, 1, 0]),
        (4, 1, [4]),
    ],
)
def test_the_first_and_last_stage_get_fewer_layers(layers: int, stages: int, counted: list[int]) -> None:
    assert counts(even_layout(layers, stages)) == counted


@pytest.mark.parametrize(("layers", "stages"), [(0, 1), (3, 0), (-1, 2), (2.5, 2), (True, 1)])
def test_layers_and_stages_must_be_positive_integers(layers: int, stages: int) -> None:
    with pytest.raises(PartitionError, match="must be a whole number above 0"):
        even_layout(layers, stages)
