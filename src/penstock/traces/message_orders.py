"""The orders in which torch's runtimes issue the messages of a compute schedule.

classes for several stages per rank   as `add-communication`: a receive where the value is sent
GPipe and 1F1B                        at use: a receive directly before its use, a send directly after F or B
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.ir.action import Action, Kind, Step
from penstock.ir.schedule import Schedule
from penstock.lowering import AddCommunication, lower

__all__ = ["message_orders", "messages_at_use"]


def message_orders(schedule: Schedule) -> list[Schedule]:
    """The schedule with its own messages, or else with those of each runtime of torch."""
    if schedule.table.has_communication or schedule.num_ranks == 1:
        return [schedule]
    lowered = [lower(schedule, [AddCommunication()])]
    return lowered + [messages_at_use(schedule)] * schedule.graph.is_chain


def messages_at_use(schedule: Schedule) -> Schedule:
    """A compute schedule over a chain with each receive before its use and each send after its computation."""
    rows = [
        [each for step in row for each in _with_messages(step, schedule, rank)]
        for rank, row in enumerate(schedule.ranks)
    ]
    return Schedule(rows, schedule.placement, schedule.microbatches, schedule.name, schedule.graph)


def _with_messages(step: Step, schedule: Schedule, rank: int) -> Iterator[Step]:
    graph, rank_of = schedule.graph, schedule.placement.stage_to_rank

    def messages(kind: Kind, part: Action, stages: tuple[int, ...]) -> Iterator[Action]:
        for other in stages:
            if rank_of[other] != rank:
                yield Action(kind, part.stage, part.microbatch, other)

    for part in step.parts:
        if part.kind is Kind.F:
            yield from messages(Kind.RECV_F, part, graph.inputs(part.stage))
        if part.kind in (Kind.B, Kind.I):
            yield from messages(Kind.RECV_B, part, graph.outputs(part.stage))
    yield step
    for part in step.parts:
        if part.kind is Kind.F:
            yield from messages(Kind.SEND_F, part, graph.outputs(part.stage))
        if part.kind in (Kind.B, Kind.I):
            yield from messages(Kind.SEND_B, part, graph.inputs(part.stage))
