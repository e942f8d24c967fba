"""Promises of the integer form: it says what the action says, also for messages off the chain."""

from __future__ import annotations

import pytest

import penstock
from penstock import BuildError, Placement, PlacementError, Schedule, ScheduleError
from penstock.ir.action import MAX_MICROBATCH, MAX_STAGE, Action, parse_action
from penstock.ir.encoding import MICROBATCH_SHIFT, PORT_SHIFT, STAGE_SHIFT, decode, encode
from penstock.ir.graph import MAX_PORTS, StageGraph
from penstock.ir.kinds import Kind

GRAPH = StageGraph(5, ((0, 1), (1, 2), (2, 3), (3, 4), (0, 2), (0, 3), (1, 4)))


def test_actions_come_back_from_their_integers() -> None:
    texts = (
        "0F0 4I3 2W1 (0F7;3B3)OVERLAP_F_B 1UNSHARD "
        "0SEND_F0 0SEND_F1>2 0SEND_F1>3 3RECV_F1<0 4SEND_B2>1 1RECV_B2<4"
    )
    steps = [parse_action(text) for text in texts.split()]
    assert list(decode(encode(steps, GRAPH), GRAPH)) == steps


def test_messages_of_one_stage_to_different_stages_are_different_integers() -> None:
    steps = [parse_action(text) for text in ("0SEND_F1", "0SEND_F1>2", "0SEND_F1>3")]
    assert len(set(encode(steps, GRAPH))) == 3


def test_the_largest_numbers_fit_beside_each_other() -> None:
    assert (MICROBATCH_SHIFT, STAGE_SHIFT, PORT_SHIFT) == (1 + 5 + 10, 1 + 5 + 10 + 20, 1 + 5 + 10 + 20 + 16)
    assert MAX_PORTS << PORT_SHIFT < 1 << 63
    largest = [Action(kind, MAX_STAGE, MAX_MICROBATCH) for kind in Kind if kind.has_microbatch]
    assert list(decode(encode(largest))) == largest


def test_more_stages_or_microbatches_than_fit_are_refused() -> None:
    with pytest.raises(PlacementError, match="at most 65536 stages"):
        Placement((0,) * (MAX_STAGE + 2))
    with pytest.raises(ScheduleError, match="at most 1048576 microbatches"):
        Schedule.parse("0F0 " * 4000, microbatches=MAX_MICROBATCH + 2)
    with pytest.raises(BuildError, match="microbatches must be at most 1000000"):
        penstock.build("gpipe", ranks=1, microbatches=MAX_MICROBATCH)
