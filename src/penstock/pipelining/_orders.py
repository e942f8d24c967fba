"""Orders in torch's form, a list of actions per rank: conversion, validation, lowering passes, dry runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
from torch.distributed.pipelining import schedules as theirs

from penstock.arguments import plural
from penstock.cost.costs import Costs
from penstock.errors import ActionError, ScheduleError
from penstock.formats import reads, write_text
from penstock.ir.action import Overlap, Step, parse_action
from penstock.ir.dataflow import Inputs, run_dataflow
from penstock.ir.kinds import SEND_WAITS, Kind
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.lowering import AddCommunication, AddReduceWaits, AddSendWaits, DeferReceives, MergeBackward
from penstock.simulation.timeline import Timeline
from penstock.validation import SendModel, invalid_schedule_error, validate
from penstock.view.perfetto import trace

_SLOT_SECONDS = 1e-6  # the duration of a time slot of a dry run in a trace
HAS_WAITS = hasattr(theirs, "WAIT_SEND_F")
"""Whether the lists of the installed torch have waits, as from 2.15 on."""

_UNFINISHED = ("missing-forward", "missing-backward", "missing-weight-gradient", "missing-reduce-grad")

ActionList: TypeAlias = list[theirs._Action | None]
ActionLists: TypeAlias = dict[int, ActionList]
Actions: TypeAlias = Sequence[theirs._Action | None]
Order: TypeAlias = Mapping[int, Actions]
Format: TypeAlias = Literal["compute_only", "compute_comms"]


class InvalidOrderError(ScheduleError, AssertionError):
    """An invalid order: our `ScheduleError` with its report, and the AssertionError that torch raises."""


class _Action(theirs._Action):
    """torch's action, parsed strictly."""

    __slots__ = ()

    @staticmethod
    def from_str(action_string: str) -> _Action | None:
        """Parse an action; None for an empty text."""
        text = action_string.strip()
        try:
            return action_of(parse_action(text)) if text else None
        except ValueError as error:  # also a kind that this torch does not have
            raise RuntimeError(f"Invalid action string: {error}") from None


def action_of(action: Step) -> _Action:
    """Return an action as torch's action; a pair has stage -1."""
    if isinstance(action, Overlap):
        return _Action(-1, theirs.OVERLAP_F_B, None, tuple(map(action_of, action.parts)))
    return _Action(action.stage, theirs._ComputationType(action.kind.value), action.microbatch)


def order_of(schedule: Schedule) -> ActionLists:
    """Return a schedule as torch's order; raise `UnhandledKindError` for kinds that torch does not have."""
    known = {kind.value for kind in theirs._ComputationType}
    schedule.table.require_handled([kind for kind in Kind if kind.value in known], "pipelining")
    return {rank: list(map(action_of, row)) for rank, row in enumerate(schedule.ranks)}


def schedule_of(
    order: Order, placement: Placement | None = None, microbatches: int | None = None, name: str = "custom"
) -> Schedule:
    """Return the schedule of an order without its idle slots; missing arguments are inferred."""
    rows = [
        [parse_action(str(action)) for action in order[rank] if action is not None] for rank in sorted(order)
    ]
    return Schedule(rows, placement, microbatches, name)


def schedule_on(order: Order, stage_to_rank: Callable[[int], int], num_stages: int | None = None) -> Schedule:
    """Return the schedule of an order with stages mapped to ranks; by default their number is inferred."""
    parts = [part for row in order.values() for part in parts_of(row)]
    stages = num_stages or 1 + max((part.stage_index for part in parts), default=0)
    placement = Placement(tuple(map(stage_to_rank, range(stages))))
    return schedule_of(order, placement, 1 + max((part.microbatch_index or 0 for part in parts), default=0))


def parts_of(row: Actions) -> list[theirs._Action]:
    """Return the actions of a list, and the parts of its overlapped pairs in place of them."""
    return [part for action in row if action is not None for part in action.sub_actions or (action,)]


def read_csv(filename: str) -> Order:
    """Return the order in a CSV file; waits are left out for a torch that has none."""
    text = Path(filename).read_text(encoding="utf-8-sig")
    schedule = reads(text, "csv", source=str(filename), name=Path(filename).stem)
    return order_of(schedule if HAS_WAITS else schedule.only(kind for kind in Kind if not kind.waits_for))


def with_waits(schedule: Schedule) -> Schedule:
    """Return a list with the waits that the installed torch requires, as lists of an older one have none."""
    if HAS_WAITS and not schedule.table.has(Kind.WAIT_REDUCE_GRAD):
        schedule = AddReduceWaits()(schedule)
    if HAS_WAITS and not schedule.table.has(*SEND_WAITS):
        schedule = AddSendWaits()(schedule)
    return schedule


@contextmanager
def as_torch_errors() -> Iterator[None]:
    """Raise our errors as `InvalidOrderError`, which is an AssertionError as in torch."""
    try:
        yield
    except (ScheduleError, ActionError) as error:
        raise InvalidOrderError(str(error)) from error


def checked_schedule(
    order: Order, ranks: int, stages: int, microbatches: int, name: str = "custom"
) -> Schedule:
    """Return the schedule of an order, validated for these numbers of ranks, stages and microbatches."""
    errors = []
    if sorted(order) != list(range(ranks)):
        present = ", ".join(map(str, sorted(order))) or "none"
        errors.append(f"the pipeline has {plural(ranks, 'rank')}, but the order has lists for rank {present}")
    for rank, row in order.items():
        wrong = [each for each in row if each is not None and not isinstance(each, theirs._Action)]
        errors += [f"rank {rank}: {each!r} is not an _Action" for each in wrong]
    if errors:
        raise InvalidOrderError("\n".join(errors))
    with as_torch_errors():
        schedule = schedule_of(order, None, microbatches, name)
        if violations := validate(schedule, "edge-streams"):
            raise invalid_schedule_error(schedule, violations)
        if schedule.num_stages != stages:
            raise ScheduleError(
                f"the order has {plural(schedule.num_stages, 'stage')}, but the pipeline has {stages}"
            )
    return schedule


def _merge_bw(compute_actions: Actions) -> ActionList:
    """Return one rank's actions with B for an adjacent I and W; torch's function empties its argument."""
    return order_of(MergeBackward()(schedule_on({0: compute_actions}, lambda _: 0)))[0]


def _add_send_recv(compute_actions: Order, stage_to_rank: Callable[[int], int], num_stages: int) -> ActionLists:
    """The order with SEND and RECV."""
    with as_torch_errors():
        return order_of(AddCommunication()(schedule_on(compute_actions, stage_to_rank, num_stages)))


def _defer_recv_ops(actions: Order, stage_to_rank: Callable[[int], int]) -> ActionLists:
    """The order with receives as late as possible; each channel receives in the order of its sends."""
    with as_torch_errors():
        return order_of(DeferReceives(past_sends=True)(schedule_on(actions, stage_to_rank)))


def _validate_schedule(
    actions: Order, pp_group_size: int, num_stages: int, num_microbatches: int
) -> dict[int, int]:
    """The stage mapping of a valid order."""
    schedule = checked_schedule(actions, pp_group_size, num_stages, num_microbatches)
    return dict(enumerate(schedule.placement.stage_to_rank))


def _simulate_comms_compute(
    pipeline_order: Order, stage_to_rank: Callable[[int], int], num_stages: int
) -> ActionLists:
    """Return the actions by time slot if every action takes one, with None where a rank waits.

    A message is received in the slot in which it is sent, or later, and the wait for its send ends in the slot
    in which it is received, or later. Without messages, a value is available in the slot after the one that
    computes it.
    """
    schedule = schedule_on(pipeline_order, stage_to_rank, num_stages)
    if errors := [each for each in validate(schedule, SendModel.BUFFERED) if each.code not in _UNFINISHED]:
        raise invalid_schedule_error(schedule, errors)
    table = schedule.table
    producer, consumer = table.crossings
    sent = table.has_communication
    if sent:
        messages = schedule.messages
        waited = messages.paired & (messages.send_wait >= 0)
        ends = [messages.send[messages.paired], messages.receive[messages.paired], messages.send_wait[waited]]
        send, receive, wait = map(table.slots_of, ends)
        producer = np.concatenate((send, table.slots_of(messages.receive[waited])))
        consumer = np.concatenate((receive, wait))
    inputs = Inputs.of(schedule.num_steps, producer, consumer, np.full(len(producer), -1 if sent else 0))
    done = run_dataflow(table, inputs, [1] * schedule.num_steps, [0] * schedule.num_ranks)
    if done.stuck:
        raise invalid_schedule_error(schedule, validate(schedule))
    times, spaced = iter(done.ends), {}
    for rank, row in order_of(schedule).items():
        when = {int(end) - 1: action for action, end in zip(row, times)}
        spaced[rank] = [when.get(slot) for slot in range(max(when, default=-1) + 1)]
    return spaced


def _dump_chrometrace(schedule: Order, filename: str) -> None:
    """Write a dry run as a trace for Perfetto: each action at its time slot, messages as arrows."""
    whole, costs = schedule_of(schedule), Costs()
    slots = [slot for rank in sorted(schedule) for slot, a in enumerate(schedule[rank]) if a is not None]
    begin = np.array(slots, dtype=np.float64) * _SLOT_SECONDS
    timeline = Timeline(whole, costs, begin, begin + _SLOT_SECONDS)
    write_text(trace([timeline]), Path(filename))
