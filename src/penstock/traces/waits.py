"""Who waits for whom: the message that each rank waits for, and where the rank at its other end is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from penstock.errors import ActionError
from penstock.ir.action import Action, parse_action
from penstock.ir.schedule import Schedule
from penstock.traces.rank_state import RankState

__all__ = ["Peer", "Wait", "find_waits"]

Peer = Literal["missing", "behind", "on its way", "there", "passed", "not in its list"]
"""Where the rank at the other end is: it has no state, it has not begun the step, it has not reached the other
end of the message, it is at it, it is past it, or its list does not have it."""


@dataclass(frozen=True)
class Wait:
    """A rank that waits for a message."""

    rank: int
    message: str
    """Its SEND or RECV."""
    for_rank: int
    counterpart: str
    """The SEND or RECV of the other rank."""
    position: int
    """The place of the counterpart in the other rank's list; -1 if unknown."""
    peer: Peer

    @property
    def is_receive(self) -> bool:
        """Whether it waits to receive."""
        return "RECV" in self.message


def find_waits(states: Mapping[int, RankState], schedule: Schedule) -> dict[int, Wait]:
    """The wait of each rank that waits for a message of the schedule."""
    found = {}
    for rank, state in states.items():
        if state.awaits and (wait := _wait(state, states, schedule)) is not None:
            found[rank] = wait
    return found


def _wait(state: RankState, states: Mapping[int, RankState], schedule: Schedule) -> Wait | None:
    try:
        message = parse_action(state.awaits)
    except ActionError:
        return None
    if not isinstance(message, Action) or message.kind.peer is None:
        return None
    hosts = schedule.placement.stage_to_rank
    if not 0 <= message.other_end < len(hosts):
        return None
    peer = hosts[message.other_end]
    counterpart = Action(message.kind.peer, message.other_end, message.microbatch, message.stage)
    where, position = _where(state, states.get(peer), counterpart)
    return Wait(state.rank, state.awaits, peer, str(counterpart), position, where)


def _where(state: RankState, peer: RankState | None, counterpart: Action) -> tuple[Peer, int]:
    if peer is None:
        return "missing", -1
    actions = [part for step in peer.schedule.ranks[peer.rank] for part in step.parts]
    if counterpart not in actions:
        return "not in its list", -1
    position = next(
        number for number, step in enumerate(peer.schedule.ranks[peer.rank]) if counterpart in step.parts
    )
    if peer.call < state.call or (peer.call == state.call and peer.mode == "connecting"):
        return "behind", position
    if peer.call > state.call or not peer.runs:
        return "passed", position
    if peer.position == position:
        return "there", position
    return ("passed" if peer.position > position else "on its way"), position
