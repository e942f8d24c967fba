"""Promise: the move that a deadlock report suggests breaks the cycle."""

from __future__ import annotations

import penstock
from penstock import Schedule

ONE_STREAM = (
    "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 | 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"
)


def test_the_suggested_move_breaks_the_cycle() -> None:
    moved = ONE_STREAM.replace("0SEND_F1 0RECV_B0", "0RECV_B0 0SEND_F1")
    assert penstock.validate(Schedule.parse(moved)) == []
