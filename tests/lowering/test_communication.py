"""Promises of add-communication, as text in and text out."""

from __future__ import annotations

import penstock
from penstock import Placement, Schedule
from penstock.lowering import (
    AddCommunication,
    lower,
)
from tests.support.passes import after


def test_a_value_is_sent_at_once_and_received_at_that_moment() -> None:
    assert after(AddCommunication(), "0F0 0F1 0B0 0B1 | 1F0 1B0 1F1 1B1") == (
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 | "
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1"
    )


def test_neighbours_on_one_rank_need_no_messages() -> None:
    lowered = after(AddCommunication(), "0F0 3F0 3B0 0B0 | 1F0 2F0 2B0 1B0")
    assert "1SEND_F0" not in lowered
    assert "2SEND_B0" not in lowered
    assert lowered.count("SEND") == lowered.count("RECV") == 4


def test_messages_of_a_pair_follow_the_whole_pair() -> None:
    text = "0F0 0F1 0B0 0B1 | 1F0 (1F1;1B0)OVERLAP_F_B 1B1"
    assert "(1F1;1B0)OVERLAP_F_B 1SEND_B0" in after(AddCommunication(), text)


def test_lowering_works_on_uneven_placements() -> None:
    uneven = Schedule.parse(
        "0F0 1F0 4F0 4B0 1B0 0B0 | 2F0 3F0 3B0 2B0", Placement.custom({0: [0, 1, 4], 1: [2, 3]})
    )
    lowered = lower(uneven)
    assert penstock.validate(lowered) == []
    assert [str(step) for step in lowered.ranks[1] if step.kind.is_communication] == [
        "2RECV_F0",
        "3SEND_F0",
        "3RECV_B0",
        "2SEND_B0",
    ]
