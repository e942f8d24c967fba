"""Promise: a layout says which layers go where, and a wrong one is refused before a model is built."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PartitionError
from penstock.planning.layout import Layout, StageLayout, even_layout, layout_of_counts, parse_layout


def refusal(text: str, layers: int | None = None, stages: int | None = None) -> str:
    with pytest.raises(PartitionError) as caught:
        parse_layout(text, layers, stages)
    return str(caught.value)


def counts(layout: Layout) -> list[int]:
    return [len(stage.layers) for stage in layout]


# --- what a text means -----------------------------------------------------------------------------


def test_a_layout_gives_each_stage_its_layers_by_number() -> None:
    assert parse_layout("Et*3|(tt|)*2,t|L", layers=8, stages=5) == (
        StageLayout(range(3), has_embedding=True),
        StageLayout(range(3, 5)),
        StageLayout(range(5, 7)),
        StageLayout(range(7, 8)),
        StageLayout(range(8, 8), has_head=True),
    )


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("EL", [0]),
        ("EttL", [2]),
        ("E|t|L", [0, 1, 0]),
        ("E t * 2 , | t L", [2, 1]),
        ("E(t)L", [1]),
        ("E((t*2|)*2t|)*2,L", [2, 2, 1, 2, 2, 1, 0]),
        ("Et*02|\n tL", [2, 1]),
        ("E(t|t)*3L", [1, 2, 2, 1]),
    ],
)
def test_repetitions_and_groups_are_written_out(text: str, layers: list[int]) -> None:
    assert counts(parse_layout(text)) == layers


ANY_LAYOUT = st.lists(st.integers(0, 6), min_size=1, max_size=9).filter(lambda some: 0 not in some[1:-1])


@given(ANY_LAYOUT)
def test_the_text_of_a_layout_means_that_layout(layers: list[int]) -> None:
    layout = layout_of_counts(layers)
    assert parse_layout(str(layout), layers=sum(layers), stages=len(layers)) == layout
    assert layout.layers == sum(layers)


def test_texts_are_short() -> None:
    assert str(parse_layout("Ettt|tt|tt|t|L")) == "Et*3|(tt|)*2,t|L"
    assert repr(even_layout(30, 8)) == "Layout('Et*3|(t*4|)*6,t*3L')"


# --- sharing evenly --------------------------------------------------------------------------------


@given(st.integers(1, 60), st.integers(1, 20))
def test_an_even_layout_has_all_layers_and_differs_by_one_at_most(layers: int, stages: int) -> None:
    if stages > layers + 2:
        with pytest.raises(PartitionError, match=f"use {layers + 2} stages or fewer"):
            even_layout(layers, stages)
        return
    layout = even_layout(layers, stages)
    shared = counts(layout)
    assert (layout.layers, len(layout)) == (layers, stages)
    assert max(shared) - min(shared) <= 1
    assert shared[-1] == min(shared)
    assert parse_layout(str(layout), layers, stages) == layout


@pytest.mark.parametrize(
    ("layers", "stages", "shared"),
    [
        (30, 8, [3, 4, 4, 4, 4, 4, 4, 3]),
        (31, 8, [4, 4, 4, 4, 4, 4, 4, 3]),
        (9, 4, [2, 2, 3, 2]),
        (5, 2, [3, 2]),
        (2, 4, [0, 1, 1, 0]),
        (4, 1, [4]),
    ],
)
def test_the_ends_have_fewer_layers_because_they_have_other_work(
    layers: int, stages: int, shared: list[int]
) -> None:
    assert counts(even_layout(layers, stages)) == shared


@pytest.mark.parametrize(("layers", "stages"), [(0, 1), (3, 0), (-1, 2), (2.5, 2), (True, 1)])
def test_an_even_layout_is_of_whole_numbers_above_zero(layers: int, stages: int) -> None:
    with pytest.raises(PartitionError, match="is a whole number above 0"):
        even_layout(layers, stages)


# --- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "position", "why"),
    [
        ("Et|(tt|L", 3, "this parenthesis is never closed"),
        ("Et|tt)*2L", 5, "this parenthesis was never opened"),
        ("E()*2tL", 1, "there is nothing in this parenthesis"),
        ("Etx|L", 2, "there is no 'x'"),
        ("et|L", 0, "there is no 'e': write 'E'"),
        ("Et|m|L", 3, "(MTP), is not supported"),
        ("Et*|L", 2, "a number goes after *"),
        ("Et*-1|L", 2, "a number goes after *"),
        ("Et*0|L", 2, "nothing is repeated 0 times"),
        ("Et3|L", 2, "a number goes after *"),
        ("*2EtL", 0, "nothing before this * to repeat"),
        ("Et*2*3L", 4, "nothing before this * to repeat"),
        ("Et|*3tL", 3, "nothing before this * to repeat"),
        ("EtE|L", 2, "E is there 2 times"),
        ("tE|L", 1, "E, the embedding, goes to the very beginning"),
        ("EL|t", 1, "L, the head, goes to the very end"),
        ("EtL*2", 2, "L is there 2 times"),
        ("|EtL", 0, "stage 0 ends here and has nothing"),
        ("Et||tL", 3, "stage 1 ends here and has nothing"),
        ("EtL|", 3, "nothing comes after this |"),
        ("Et\u0663L", 2, "a number goes after *"),
    ],
)
def test_a_fault_is_told_with_its_place(text: str, position: int, why: str) -> None:
    message = refusal(text)
    _, shown, told = message.split("\n")[:3]
    assert shown == f"  {text}"
    assert told.startswith(f"  {' ' * position}^ position {position}: ")
    assert why in told


def test_the_place_is_right_in_a_long_text_too() -> None:
    text = "E" + "t|" * 100 + "x" + "t|" * 100 + "L"
    _, shown, told = refusal(text).split("\n")
    assert len(shown) < 80
    assert shown[told.index("^")] == "x"
    assert "position 201" in told


def test_every_fault_is_told_at_once() -> None:
    message = refusal("t(|E*x m**2")
    for fault in ("never closed", "'x'", "MTP", "number goes after *", "very beginning", "write L at the end"):
        assert fault in message


def test_of_very_many_faults_some_are_told() -> None:
    assert "and 90 more" in refusal("x" * 100)


@pytest.mark.parametrize("text", ["", "   ", "t"])
def test_both_ends_of_the_model_must_be_there(text: str) -> None:
    message = refusal(text)
    assert "no stage has the embedding: write E at the beginning" in message
    assert "no stage has the head: write L at the end" in message


def test_layers_that_would_be_dropped_or_do_not_exist_are_named() -> None:
    assert "28 layers (t), the model has 30: layers 28 to 29 would be left out" in refusal("Et*28L", 30)
    assert "31 layers (t), the model has 30: there is no layer 30" in refusal("Et*31L", 30)


def test_a_layout_must_have_the_stages_of_the_schedule() -> None:
    message = refusal("Et*4|(t*5|)*4,t*4L", layers=30, stages=8)
    assert "the layout has 6 stages, the schedule has 8" in message
    assert "the layout has 28 layers" in message


@pytest.mark.parametrize(
    "text",
    [
        "(t*1000000)*1000000",
        "E" + "(" * 20 + "t" + ")*9" * 20 + "L",
        "Et*" + "9" * 5000,
        "E" + "(t" * 19_000 + ")*1" * 19_000 + "L",
        "t" * 200_000,
        "t*90000" * 10_000,
    ],
    ids=range(6),
)
def test_texts_that_would_blow_up_are_refused_quickly(text: str) -> None:
    start = time.perf_counter()
    message = refusal(text, layers=4)
    assert time.perf_counter() - start < 2
    assert len(message) < 3000


@pytest.mark.parametrize("text", [None, 3, ["Et", "L"]])
def test_only_a_text_is_a_layout(text: str) -> None:
    assert "a layout is a text such as" in refusal(text)


def test_texts_that_could_steer_a_terminal_are_shown_harmlessly() -> None:
    assert "\x1b" not in refusal("Et\x1b[31mL")
