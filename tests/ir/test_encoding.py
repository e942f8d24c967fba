"""Promises of the integer form: it says what the action says, also for messages off the chain."""

from __future__ import annotations

from penstock.ir.action import parse_action
from penstock.ir.encoding import decode, encode
from penstock.ir.graph import StageGraph

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
