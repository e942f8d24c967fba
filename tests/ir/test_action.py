from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ActionError
from penstock.ir.action import MAX_MICROBATCH, MAX_STAGE, Action, Overlap, Step, parse_action
from penstock.ir.encoding import MICROBATCH_SHIFT, code_of, decode, encode
from penstock.ir.kinds import Kind

COMPUTE = {Kind.F, Kind.I, Kind.W, Kind.B, Kind.RECOMPUTE, Kind.OVERLAP_F_B}
SENDS = {Kind.SEND_F, Kind.SEND_B}
RECEIVES = {Kind.RECV_F, Kind.RECV_B}
WHOLE_STAGE = {Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD, Kind.WAIT_REDUCE_GRAD}

# one text of each of the fifteen kinds
TEXTS: list[tuple[str, Step]] = [
    ("2F0", Action(Kind.F, 2, 0)),
    ("1I3", Action(Kind.I, 1, 3)),
    ("1W3", Action(Kind.W, 1, 3)),
    ("0B2", Action(Kind.B, 0, 2)),
    ("3SEND_F1", Action(Kind.SEND_F, 3, 1)),
    ("4RECV_F1", Action(Kind.RECV_F, 4, 1)),
    ("3SEND_B0", Action(Kind.SEND_B, 3, 0)),
    ("2RECV_B0", Action(Kind.RECV_B, 2, 0)),
    ("3WAIT_SEND_F1", Action(Kind.WAIT_SEND_F, 3, 1)),
    ("3WAIT_SEND_B0", Action(Kind.WAIT_SEND_B, 3, 0)),
    ("1UNSHARD", Action(Kind.UNSHARD, 1)),
    ("1RESHARD", Action(Kind.RESHARD, 1)),
    ("0REDUCE_GRAD", Action(Kind.REDUCE_GRAD, 0)),
    ("0WAIT_REDUCE_GRAD", Action(Kind.WAIT_REDUCE_GRAD, 0)),
    ("1RECOMPUTE3", Action(Kind.RECOMPUTE, 1, 3)),
    ("1OFFLOAD3", Action(Kind.OFFLOAD, 1, 3)),
    ("1RELOAD3", Action(Kind.RELOAD, 1, 3)),
    ("(0F7;7B3)OVERLAP_F_B", Overlap(Action(Kind.F, 0, 7), Action(Kind.B, 7, 3))),
]


# --- kinds -----------------------------------------------------------------------------------------


def test_there_are_eighteen_kinds_and_each_has_its_own_number() -> None:
    assert [kind.number for kind in Kind] == list(range(18))
    assert {step.kind for _, step in TEXTS} == set(Kind)


@pytest.mark.parametrize("kind", Kind, ids=str)
def test_a_kind_is_compute_send_receive_or_about_a_whole_stage(kind: Kind) -> None:
    assert kind.is_compute == (kind in COMPUTE)
    assert kind.is_backward == (kind in {Kind.I, Kind.W, Kind.B})
    assert kind.is_send == (kind in SENDS)
    assert kind.is_receive == (kind in RECEIVES)
    assert kind.is_communication == (kind in SENDS | RECEIVES)
    assert kind.has_microbatch == (kind not in WHOLE_STAGE | {Kind.OVERLAP_F_B})
    assert str(kind) == kind.value == kind.name


@pytest.mark.parametrize("kind", Kind, ids=str)
def test_only_messages_have_a_peer_and_it_is_the_other_end(kind: Kind) -> None:
    if not kind.is_communication:
        assert kind.peer is None
        return
    assert kind.peer is not None
    assert kind.peer.peer is kind
    assert kind.peer.is_send == kind.is_receive
    assert kind.peer.value[-2:] == kind.value[-2:]


# --- values ----------------------------------------------------------------------------------------


def test_actions_are_values_that_do_not_change() -> None:
    action = Action(Kind.F, 2, 0)
    assert len({action, Action(Kind.F, 2, 0), Action(Kind.F, 2, 1)}) == 2
    with pytest.raises(FrozenInstanceError):
        action.stage = 3  # type: ignore[misc]


def test_an_action_is_its_own_only_part_and_a_pair_has_two() -> None:
    forward, backward = Action(Kind.F, 0, 7), Action(Kind.B, 7, 3)
    assert forward.parts == (forward,)
    assert Overlap(forward, backward).parts == (forward, backward)
    assert Overlap(forward, backward).kind is Kind.OVERLAP_F_B


@pytest.mark.parametrize(
    ("kind", "stage", "microbatch", "reason"),
    [
        (Kind.F, 0, None, "F needs a microbatch"),
        (Kind.SEND_B, 0, None, "SEND_B needs a microbatch"),
        (Kind.UNSHARD, 0, 0, "UNSHARD has no microbatch"),
        (Kind.F, -1, 0, "stage -1 is not in 0..65535"),
        (Kind.F, 0, -1, "microbatch -1 is not in 0..1048575"),
        (Kind.F, MAX_STAGE + 1, 0, "stage 65536 is not in"),
        (Kind.F, 0, MAX_MICROBATCH + 1, "microbatch 1048576 is not in"),
        (Kind.OVERLAP_F_B, 0, None, "an overlapped pair is an Overlap"),
    ],
)
def test_an_invalid_action_is_rejected_at_construction(
    kind: Kind, stage: int, microbatch: int | None, reason: str
) -> None:
    with pytest.raises(ActionError, match=reason):
        Action(kind, stage, microbatch)


@pytest.mark.parametrize("number", [True, 1.5, "1"])
def test_a_number_that_is_not_whole_is_rejected_at_construction(number: Any) -> None:
    with pytest.raises(ActionError):
        Action(Kind.F, number, 0)
    with pytest.raises(ActionError):
        Action(Kind.F, 0, number)


@pytest.mark.parametrize("kind_of_int", [np.int32, np.int64, np.uint8])
def test_integers_of_numpy_are_accepted(kind_of_int: Any) -> None:
    action = Action(Kind.F, kind_of_int(5), kind_of_int(3))
    assert list(decode(encode([action]))) == [Action(Kind.F, 5, 3)]


@pytest.mark.parametrize(
    ("forward", "backward", "position", "reason"),
    [
        ("1B0", "2B1", 1, "the first part of an overlap is a forward"),
        ("1UNSHARD", "2B1", 1, "the first part of an overlap is a forward"),
        ("1F0", "2F1", 5, "the second part of an overlap is a backward"),
        ("1F0", "2W1", 5, "the second part of an overlap is a backward"),
        ("10F10", "2SEND_B1", 7, "the second part of an overlap is a backward"),
    ],
)
def test_a_pair_is_a_forward_and_then_a_backward(
    forward: str, backward: str, position: int, reason: str
) -> None:
    first, second = parse_action(forward), parse_action(backward)
    assert isinstance(first, Action)
    assert isinstance(second, Action)
    with pytest.raises(ActionError, match=reason) as caught:
        Overlap(first, second)
    assert caught.value.position == position


# --- text ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "step"), TEXTS, ids=[text for text, _ in TEXTS])
def test_every_kind_has_a_text_and_the_text_is_read_back(text: str, step: Step) -> None:
    assert parse_action(text) == step
    assert str(step) == text


def test_a_forward_overlaps_with_an_input_gradient_too() -> None:
    assert str(parse_action("(0F7;7I3)OVERLAP_F_B")) == "(0F7;7I3)OVERLAP_F_B"


def test_the_largest_numbers_are_read() -> None:
    assert parse_action(f"{MAX_STAGE}F{MAX_MICROBATCH}") == Action(Kind.F, MAX_STAGE, MAX_MICROBATCH)


# what is wrong, where it stands, and what the message says about it
REFUSED = [
    # torch stops reading where its pattern ends and lets the rest through
    ("1F0junk", 3, "unexpected text after the action"),
    ("1F", 2, "F needs a microbatch number"),
    ("1UNSHARD3", 8, "nothing may follow"),
    ("1REDUCE_GRAD0", 12, "nothing may follow"),
    ("1F-1", 2, "F needs a microbatch number"),
    ("1F0 ", 3, "unexpected text after the action"),
    ("1F0\n", 3, "unexpected text after the action"),
    ("1F0,1F1", 3, "unexpected text after the action"),
    ("1SEND_F", 7, "SEND_F needs a microbatch number"),
    # no stage
    ("", 0, "the text is empty"),
    (" ", 0, "does not begin with a stage number"),
    (" 1F0", 0, "does not begin with a stage number"),
    ("-1F0", 0, "does not begin with a stage number"),
    ("+1F0", 0, "does not begin with a stage number"),
    ("F0", 0, "does not begin with a stage number"),
    (")", 0, "does not begin with a stage number"),
    ("\x00", 0, "does not begin with a stage number"),
    # no kind
    ("1", 1, "unknown kind of action"),
    ("1 F0", 1, "unknown kind of action"),
    ("1f0", 1, "unknown kind of action"),
    ("1X0", 1, "unknown kind of action"),
    ("12SENDF0", 2, "unknown kind of action"),
    ("1OVERLAP_F_B", 1, "unknown kind of action"),
    ("1_0F0", 1, "unknown kind of action"),
    # numbers that int() would take
    ("01F0", 0, "leading zero"),
    ("1F00", 2, "leading zero"),
    ("1F1_0", 3, "unexpected text after the action"),
    ("١F0", 0, "does not begin with a stage number"),
    ("1F١", 2, "F needs a microbatch number"),
    ("1F²", 2, "F needs a microbatch number"),
    ("\uff11F0", 0, "does not begin with a stage number"),  # a full-width 1
    ("65536F0", 0, "the stage number is larger than 65535"),
    ("1F1048576", 2, "the microbatch number is larger than 1048575"),
    ("1SEND_F0>65536", 9, "the other end's stage number is larger than 65535"),
    ("9" * 5000 + "F0", 0, "the stage number is larger"),
    ("1F" + "9" * 5000, 2, "the microbatch number is larger"),
    # pairs
    ("(", 1, "not closed"),
    ("(1F0;2B1", 8, "not closed"),
    ("()OVERLAP_F_B", 1, "the text is empty"),
    ("(;)OVERLAP_F_B", 1, "the text is empty"),
    ("(1F0;)OVERLAP_F_B", 5, "the text is empty"),
    ("(1F0;2B1)", 9, "ends in OVERLAP_F_B"),
    ("(1F0;2B1)F", 9, "ends in OVERLAP_F_B"),
    ("(1F0;2B1)OVERLAP_F_B0", 9, "ends in OVERLAP_F_B"),
    ("(1F0;2B1)OVERLAP_F_B ", 9, "ends in OVERLAP_F_B"),
    ("(1F0)OVERLAP_F_B", 1, "2 parts"),
    ("(1F0;2B1;3B2)OVERLAP_F_B", 1, "2 parts, a forward and a backward, not 3"),
    ("(1F0;2B1x)OVERLAP_F_B", 8, "unexpected text after the action"),
    ("(1F0; 2B1)OVERLAP_F_B", 5, "does not begin with a stage number"),
    ("(1F0;2B01)OVERLAP_F_B", 7, "leading zero"),
    ("(1B0;2F1)OVERLAP_F_B", 1, "the first part of an overlap is a forward"),
    ("(1F0;2W1)OVERLAP_F_B", 5, "the second part of an overlap is a backward"),
]


@pytest.mark.parametrize(
    ("text", "position", "reason"), REFUSED, ids=[ascii(text[:24]) for text, _, _ in REFUSED]
)
def test_a_text_that_is_not_an_action_is_rejected_with_the_position_of_the_error(
    text: str, position: int, reason: str
) -> None:
    with pytest.raises(ActionError, match=reason) as caught:
        parse_action(text)
    assert caught.value.position == position
    assert caught.value.text == text


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("((1F0;2B1)OVERLAP_F_B;1B0)OVERLAP_F_B", 1),
        ("(1F0;(2F0;3B0)OVERLAP_F_B)OVERLAP_F_B", 5),
    ],
)
def test_a_pair_within_a_pair_is_rejected_where_it_begins(text: str, position: int) -> None:
    with pytest.raises(ActionError) as caught:
        parse_action(text)
    assert caught.value.position == position


def test_ten_thousand_brackets_are_rejected_like_one() -> None:
    with pytest.raises(ActionError, match="an overlapped pair cannot contain another pair"):
        parse_action("(" * 10_000)


def test_a_message_about_a_bad_kind_names_the_kinds_there_are() -> None:
    with pytest.raises(
        ActionError,
        match="F I W B SEND_F RECV_F SEND_B RECV_B WAIT_SEND_F WAIT_SEND_B UNSHARD RESHARD REDUCE_GRAD",
    ):
        parse_action("1X0")


# --- promises for all actions ----------------------------------------------------------------------

stages, microbatches = st.integers(0, MAX_STAGE), st.integers(0, MAX_MICROBATCH)


def action_of(*kinds: Kind) -> st.SearchStrategy[Action]:
    return st.sampled_from(kinds).flatmap(
        lambda kind: st.builds(
            Action, st.just(kind), stages, microbatches if kind.has_microbatch else st.none()
        )
    )


steps: st.SearchStrategy[Step] = st.one_of(
    action_of(*(kind for kind in Kind if kind is not Kind.OVERLAP_F_B)),
    st.builds(Overlap, action_of(Kind.F), action_of(Kind.B, Kind.I)),
)


@given(steps)
def test_everything_printed_is_read_back(step: Step) -> None:
    assert parse_action(str(step)) == step


@given(st.lists(steps))
def test_everything_encoded_is_decoded(row: list[Step]) -> None:
    codes = list(encode(row))
    assert list(decode(codes)) == row
    assert all(0 <= code < 1 << 59 for code in codes)
    assert len(codes) == sum(len(step.parts) for step in row)


@given(st.text() | st.text("0123456789FIWB();SENDRCV_OLAPUHGT", max_size=30))
def test_any_text_is_an_action_or_is_rejected_at_a_position_inside_it(text: str) -> None:
    try:
        step = parse_action(text)
    except ActionError as error:
        assert 0 <= error.position <= len(text)  # noqa: PT017 -- either answer is right
    else:
        assert str(step) == text


def test_a_code_moves_along_by_microbatches() -> None:
    assert code_of(Kind.F, 2, 5) == code_of(Kind.F, 2) + (5 << MICROBATCH_SHIFT)
