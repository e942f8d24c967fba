"""The critical path of a measured step: what each rank did while the others waited for it.

The path goes back from the last call of a step to the first: from a wait that had to wait to the send on the
other rank, else to the call before it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from penstock.ir.action import Action
from penstock.ir.kinds import Kind
from penstock.runtime.program.program import CallType

__all__ = ["PARTS", "StepTimes", "Timed", "breakdown", "seconds_by_call"]

PARTS = (
    "sleep",
    "stage",
    "action",
    "send",
    "message",
    "post",
    "wait",
    "release",
    "between",
    "gc",
    "begin",
    "end",
)


class Timed(NamedTuple):
    """One call of a step."""

    type: CallType
    action: Action
    """The action, the receive that is waited for, or the send that is released."""
    begin: float
    end: float
    slept: float
    """As long as the stage was to sleep."""
    kinds: tuple[Kind, ...] = ()
    """Those of the action, two of an overlapped pair."""

    @property
    def is_send(self) -> bool:
        """Whether it sends a message."""
        return self.type is CallType.ACTION and self.action.kind.is_send


class StepTimes(NamedTuple):
    """One step on one rank."""

    entered: float
    calls: list[Timed]
    left: float
    collections: list[tuple[float, float]]
    """Begin and end of garbage collections."""


class _Segment(NamedTuple):
    rank: int
    part: str
    begin: float
    end: float
    call: Timed | None = None


def breakdown(
    ranks: list[StepTimes], hosts: tuple[int, ...], stage_seconds: Mapping[Kind, float]
) -> dict[str, float]:
    """Seconds of each part of the critical path; `hosts` are the ranks of the stages.

    `stage_seconds` are those of an action without a pipeline, with its sleeps.
    """
    total: dict[str, float] = defaultdict(float)
    for rank, part, begin, end, call in _path(ranks, hosts):
        seconds = end - begin
        if part == "action" and call is not None:
            own = sum(stage_seconds.get(kind, 0.0) for kind in call.kinds)
            total["sleep"] += call.slept
            total["stage"] += own - call.slept
            seconds -= own
        collected = sum(max(0.0, min(end, e) - max(begin, b)) for b, e in ranks[rank].collections)
        total["gc"] += collected
        total[part] += seconds - collected
    return total


def seconds_by_call(ranks: list[StepTimes]) -> Iterator[tuple[str, float]]:
    """What was called and how long it took, without sleeps; of waits, those for messages that had been sent."""
    sends = _sends(ranks)
    for times in ranks:
        for call in times.calls:
            seconds = call.end - call.begin - call.slept
            if call.type.name in ("POST", "RELEASE"):
                yield call.type.name.lower(), seconds
            elif call.type is CallType.ACTION:
                yield str(call.action.kind.value), seconds
            else:
                send = sends[_key_of_send(call.action)][1]
                if _waits_for(call, send):
                    yield "message", call.end - send.end
                elif send.end < call.begin:
                    yield "wait", seconds


def _path(ranks: list[StepTimes], hosts: tuple[int, ...]) -> Iterator[_Segment]:
    sends = _sends(ranks)
    rank = max(range(len(ranks)), key=lambda each: ranks[each].calls[-1].end)
    index = len(ranks[rank].calls) - 1
    now = ranks[rank].calls[index].end
    yield _Segment(rank, "end", now, max(times.left for times in ranks))
    while index >= 0:
        call = ranks[rank].calls[index]
        if now > call.end:
            yield _Segment(rank, "between", call.end, now)
        sent_at, sent = sends[_key_of_send(call.action)] if call.type is CallType.WAIT else (-1, None)
        if sent is not None and _waits_for(call, sent):
            yield _Segment(rank, "message", sent.end, call.end)
            rank, index = hosts[call.action.other_end], sent_at
            call = sent
        yield _Segment(rank, _part_of(call), call.begin, call.end, call)
        now, index = call.begin, index - 1
    yield _Segment(rank, "begin", ranks[rank].entered, now)


def _sends(ranks: list[StepTimes]) -> dict[tuple[Kind, int, int | None, int], tuple[int, Timed]]:
    """The sends of all ranks, with their indices."""
    return {
        _key(call.action): (index, call)
        for times in ranks
        for index, call in enumerate(times.calls)
        if call.is_send
    }


def _key(message: Action) -> tuple[Kind, int, int | None, int]:
    return message.kind, message.stage, message.microbatch, message.other_end


def _key_of_send(receive: Action) -> tuple[Kind, int, int | None, int]:
    kind = Kind.SEND_F if receive.kind is Kind.RECV_F else Kind.SEND_B
    return kind, receive.other_end, receive.microbatch, receive.stage


def _waits_for(wait: Timed, send: Timed) -> bool:
    """Whether a wait began before the end of the send; the check of the other rank's call ends before it."""
    return send.end > wait.begin and send.begin < wait.end


def _part_of(call: Timed) -> str:
    if call.type is CallType.ACTION:
        return "send" if call.is_send else "action"
    return call.type.name.lower()
