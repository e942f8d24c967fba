"""Promises of the layout notation: texts mean what Megatron's mean, and all problems are reported."""

from __future__ import annotations

import time

import pytest

from penstock.errors import PartitionError
from penstock.planning.layout import StageLayout, parse_layout


def rejection(text: str, layers: int | None = None, stages: int | None = None) -> str:
    with pytest.raises(PartitionError) as caught:
        parse_layout(text, layers, stages)
    return str(caught.value)


# --- valid layouts ---------------------------------------------------------------------------------


def test_a_layout_assigns_layers_to_stages() -> None:
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
def test_repetitions_and_groups_are_expanded(text: str, layers: list[int]) -> None:
    assert [len(stage.layers) for stage in parse_layout(text)] == layers


def test_multi_token_prediction_and_empty_stages_are_as_in_megatron() -> None:
    layout = parse_layout("Et*3|(tt|)*29,m|L", layers=61, stages=32, mtp_layers=1)
    assert str(layout) == "Et*3|(tt|)*29,m|L"
    assert (layout[30].mtp_layers, layout.mtp_layers, len(layout[29].layers)) == (1, 1, 2)
    assert [stage.is_empty for stage in parse_layout("E||t|L")] == [False, True, False, False]
    for text in ("E||t|L", "Et|||(tt|)*2,m*3L", "E|||L"):
        assert str(parse_layout(text)) == text
    with pytest.raises(PartitionError, match=r"the layout has 2 MTP layers \(m\), but the model has 0"):
        parse_layout("Et|tmmL", layers=2, mtp_layers=0)


# --- invalid layouts -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "position", "why"),
    [
        ("Et|(tt|L", 3, "this parenthesis is not closed"),
        ("Et|tt)*2L", 5, "this parenthesis was not opened"),
        ("E()*2tL", 1, "empty parentheses"),
        ("Etx|L", 2, "unknown character 'x'"),
        ("et|L", 0, "unknown letter 'e': did you mean 'E'?"),
        ("Et|m|t|L", 5, "t after m: MTP layers (m) come after the last layer (t)"),
        ("Et|m|m|L", 5, "all m must be in one stage; the first is in stage 1"),
        ("EtM|L", 2, "unknown letter 'M': did you mean 'm'?"),
        ("Et*|L", 2, "a number must follow *"),
        ("Et*-1|L", 2, "a number must follow *"),
        ("Et*0|L", 2, "cannot repeat 0 times"),
        ("Et3|L", 2, "a number must follow *"),
        ("*2EtL", 0, "nothing to repeat"),
        ("Et*2*3L", 4, "nothing to repeat"),
        ("Et|*3tL", 3, "nothing to repeat"),
        ("EtE|L", 2, "E occurs 2 times"),
        ("tE|L", 1, "E, the embedding, must come first"),
        ("EL|t", 1, "L, the head, must come last"),
        ("EtL*2", 2, "L occurs 2 times"),
        ("|EtL", 0, "the first stage is empty, but it has the embedding (E)"),
        ("EtL|", 3, "the last stage is empty, but it has the head (L)"),
        ("Et\u0663L", 2, "a number must follow *"),
    ],
)
def test_a_problem_is_reported_with_its_position(text: str, position: int, why: str) -> None:
    message = rejection(text)
    _, shown, reported = message.split("\n")[:3]
    assert shown == f"  {text}"
    assert reported.startswith(f"  {' ' * position}^ position {position}: ")
    assert why in reported


def test_the_position_is_correct_in_a_long_text() -> None:
    text = "E" + "t|" * 100 + "x" + "t|" * 100 + "L"
    _, shown, reported = rejection(text).split("\n")
    assert len(shown) < 80
    assert shown[reported.index("^")] == "x"
    assert "position 201" in reported


def test_all_problems_are_reported() -> None:
    message = rejection("t(|E*x m**2")
    for problem in ("not closed", "'x'", "number must follow *", "come first", "end the layout with L"):
        assert problem in message


def test_a_long_list_of_problems_is_shortened() -> None:
    assert "and 90 more" in rejection("x" * 100)


@pytest.mark.parametrize("text", ["", "   ", "t"])
def test_embedding_and_head_are_required(text: str) -> None:
    message = rejection(text)
    assert "the embedding is missing: start the layout with E" in message
    assert "the head is missing: end the layout with L" in message


def test_unassigned_and_unknown_layers_are_named() -> None:
    assert "28 layers (t), but the model has 30: layers 28 to 29 would be left out" in rejection("Et*28L", 30)
    assert "31 layers (t), but the model has 30: layer 30 does not exist" in rejection("Et*31L", 30)


def test_the_number_of_stages_must_match_the_schedule() -> None:
    message = rejection("Et*4|(t*5|)*4,t*4L", layers=30, stages=8)
    assert "the layout has 6 stages, but the schedule has 8" in message
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
def test_texts_that_expand_to_huge_layouts_are_rejected_quickly(text: str) -> None:
    start = time.perf_counter()
    message = rejection(text, layers=4)
    assert time.perf_counter() - start < 2
    assert len(message) < 3000


@pytest.mark.parametrize("text", [None, 3, ["Et", "L"]])
def test_a_layout_must_be_a_string(text: str) -> None:
    assert "a layout is a string such as" in rejection(text)


def test_control_characters_are_not_printed() -> None:
    assert "\x1b" not in rejection("Et\x1b[31mL")
