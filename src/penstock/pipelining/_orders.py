"""Orders as torch writes them, a list of actions for each rank, and what our rooms do with them."""

# ruff: noqa: SLF001 -- what torch keeps private is what this is about

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
from torch.distributed.pipelining import schedules as theirs

from penstock.cost.costs import Costs
from penstock.errors import ActionError, ScheduleError
from penstock.formats import reads, write_text
from penstock.ir.action import Action, Kind, Overlap, Step, parse_action
from penstock.ir.dataflow import Inputs, run_dataflow
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.lowering import AddCommunication, AddGradReduction, AddSharding, DeferReceives, MergeBackward
from penstock.simulation.network import Run
from penstock.simulation.simulator import Engine
from penstock.simulation.timeline import Timeline
from penstock.validation import MODELS, refusal, validate
from penstock.validation.communication import Messages
from penstock.view.perfetto import trace

_STEP = 1e-6  # what a step of a dry run takes in a trace
_UNFINISHED = ("missing-forward", "missing-backward", "missing-weight-gradient", "missing-reduce-grad")

List: TypeAlias = list[theirs._Action | None]
Lists: TypeAlias = dict[int, List]
Row: TypeAlias = Sequence[theirs._Action | None]
Order: TypeAlias = Mapping[int, Row]
Format: TypeAlias = Literal["compute_only", "compute_comms"]


class RefusedError(ScheduleError, AssertionError):
    """A schedule with faults: ours by its report, torch's by its kind."""


class _Action(theirs._Action):
    """torch's action, read as strictly as all our texts."""

    __slots__ = ()

    @staticmethod
    def from_str(action_string: str) -> _Action | None:
        """The action of a text, all of it; None for an empty one."""
        text = action_string.strip()
        try:
            return action_of(parse_action(text)) if text else None
        except ActionError as error:
            raise RuntimeError(f"Invalid action string: {error}") from None


def action_of(step: Step) -> _Action:
    """A step as torch's action; a pair stands at stage -1."""
    if isinstance(step, Overlap):
        return _Action(-1, theirs.OVERLAP_F_B, None, tuple(map(action_of, step.parts)))
    return _Action(step.stage, theirs._ComputationType(step.kind.value), step.microbatch)


def step_of(action: theirs._Action) -> Step:
    """A step of ours for torch's action."""
    if action.sub_actions is not None or action.stage_index < 0:
        return parse_action(str(action))
    return Action(Kind(action.computation_type.value), action.stage_index, action.microbatch_index)


def order_of(schedule: Schedule) -> Lists:
    """The lists of a schedule."""
    return {rank: list(map(action_of, row)) for rank, row in enumerate(schedule.ranks)}


def schedule_of(
    order: Order, placement: Placement | None = None, microbatches: int | None = None, name: str = "custom"
) -> Schedule:
    """The schedule of lists, idle slots left out; what is not given is inferred."""
    rows = [[step_of(action) for action in order[rank] if action is not None] for rank in sorted(order)]
    return Schedule(rows, placement, microbatches, name)


def placed(order: Order, stage_to_rank: Callable[[int], int], num_stages: int | None = None) -> Schedule:
    """The schedule of lists whose stages are put on ranks by a function; as many as are named, unless said."""
    parts = [part for row in order.values() for part in _parts(row)]
    stages = num_stages or 1 + max((part.stage_index for part in parts), default=0)
    hosts = Placement(tuple(stage_to_rank(stage) for stage in range(stages)))
    return schedule_of(order, hosts, 1 + max((part.microbatch_index or 0 for part in parts), default=0))


def _parts(row: Row) -> list[theirs._Action]:
    return [part for action in row if action is not None for part in action.sub_actions or (action,)]


def one_rank(actions: Row) -> Schedule:
    """One rank's list alone."""
    return placed({0: actions}, lambda _: 0)


def read_csv(filename: str) -> Order:
    """The lists in a file."""
    text = Path(filename).read_text(encoding="utf-8-sig")
    return order_of(reads(text, "csv", source=str(filename), name=Path(filename).stem))


@contextmanager
def refused() -> Iterator[None]:
    """What we refuse in here, torch would assert."""
    try:
        yield
    except (ScheduleError, ActionError) as error:
        raise RefusedError(str(error)) from error


def checked(order: Order, ranks: int, stages: int, microbatches: int, name: str = "custom") -> Schedule:
    """The schedule of lists, proved to be right for so many ranks, stages and microbatches."""
    faults = []
    if sorted(order) != list(range(ranks)):
        there = ", ".join(map(str, sorted(order))) or "none"
        faults.append(f"there are {ranks} ranks, 0 to {ranks - 1}, but the order has lists for rank {there}")
    for rank, row in order.items():
        wrong = [each for each in row if each is not None and not isinstance(each, theirs._Action)]
        faults += [f"rank {rank}: {each!r} is not an _Action" for each in wrong]
    if faults:
        raise RefusedError("\n".join(faults))
    with refused():
        schedule = schedule_of(order, None, microbatches, name)
        if found := validate(schedule, "edge-streams"):
            raise refusal(schedule, found)
        if schedule.num_stages != stages:
            raise ScheduleError(f"the order has {schedule.num_stages} stages, but the pipeline has {stages}")
    return schedule


def _add_unshard_reshard(compute_actions: Row, max_active_stages: int = 3) -> List:
    """One rank's list with UNSHARD and RESHARD."""
    return order_of(AddSharding(max_active_stages)(one_rank(compute_actions)))[0]


def _add_reduce_grad(actions: Row, n_microbatches: int) -> List:
    """One rank's list with REDUCE_GRAD behind a stage's last backward, where it has them all."""
    counted = [part for part in _parts(actions) if theirs._requires_reduce_grad(part.computation_type)]
    done = Counter(part.stage_index for part in counted)
    early = [_Action(stage, theirs.REDUCE_GRAD) for stage, count in done.items() if count < n_microbatches]
    return [action for action in order_of(AddGradReduction()(one_rank(actions)))[0] if action not in early]


def _merge_bw(compute_actions: Row) -> List:
    """One rank's list with B in place of an I and its own W side by side."""
    return order_of(MergeBackward()(one_rank(compute_actions)))[0]


def _add_send_recv(compute_actions: Order, stage_to_rank: Callable[[int], int], num_stages: int) -> Lists:
    """All lists with SEND and RECV."""
    with refused():
        return order_of(AddCommunication()(placed(compute_actions, stage_to_rank, num_stages)))


def _defer_recv_ops(actions: Order, stage_to_rank: Callable[[int], int]) -> Lists:
    """All lists with receives as late as they can be; a channel's stay in the order of its sends."""
    with refused():
        return order_of(DeferReceives(past_sends=True)(placed(actions, stage_to_rank)))


def _validate_schedule(
    actions: Order, pp_group_size: int, num_stages: int, num_microbatches: int
) -> dict[int, int]:
    """Which rank has which stage, if the order is right."""
    schedule = checked(actions, pp_group_size, num_stages, num_microbatches)
    return dict(enumerate(schedule.placement.stage_to_rank))


def _simulate_comms_compute(
    pipeline_order: Order, stage_to_rank: Callable[[int], int], num_stages: int
) -> Lists:
    """When each action runs if each takes one step, with None where a rank waits.

    A message is received in the step in which it is sent, or later. Without messages, a value is there in the
    step after the one that makes it.
    """
    schedule = placed(pipeline_order, stage_to_rank, num_stages)
    if faults := [fault for fault in validate(schedule, MODELS[0]) if fault.code not in _UNFINISHED]:
        raise refusal(schedule, faults)
    table = schedule.table
    producer, consumer = table.crossings
    sent = table.has_communication
    if sent:
        messages = Messages.of(table)
        producer, consumer = (table.slot[end[messages.paired]] for end in (messages.send, messages.receive))
    inputs = Inputs.of(schedule.num_steps, producer, consumer, np.full(len(producer), -1 if sent else 0))
    done = run_dataflow(table, inputs, [1] * schedule.num_steps, [0] * schedule.num_ranks)
    if done.stuck:
        raise refusal(schedule, validate(schedule))
    ends, spaced = iter(done.ends), {}
    for rank, row in order_of(schedule).items():
        when = {int(end) - 1: action for action, end in zip(row, ends)}
        spaced[rank] = [when.get(step) for step in range(max(when, default=-1) + 1)]
    return spaced


def _dump_chrometrace(schedule: Order, filename: str) -> None:
    """A dry run as a file for Perfetto: each action where it stands in its list, messages as arrows."""
    whole, costs = schedule_of(schedule), Costs()
    places = [step for rank in sorted(schedule) for step, a in enumerate(schedule[rank]) if a is not None]
    begin = np.array(places, dtype=np.float64) * _STEP
    timeline = Timeline(whole, costs, Run(begin, begin + _STEP, None), Engine(whole, costs).run)
    write_text(trace([timeline]), Path(filename))
