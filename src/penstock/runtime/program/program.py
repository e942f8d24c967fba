"""The program of one rank: its list of actions compiled into bound calls, and the progress through them.

A step is one loop over the calls, without decisions. An action becomes the call that runs it, after waits for
the messages that it needs. What can be done while a rank waits, it does before the wait: it posts the next
receive and releases the buffers of sends.

    2F1   receive.post(2)   send.release(0)   receive.wait(1)   stage.forward(1)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch

from penstock.ir.action import Action, Overlap, Step
from penstock.ir.dataflow import Inputs, run_dataflow
from penstock.ir.encoding import JOINED, STAGE_SHIFT, Ints, kinds_in
from penstock.ir.kinds import MEMORY_KINDS, SEND_WAITS, Kind, handler_of
from penstock.ir.schedule import Schedule
from penstock.runtime.config import ActionCall, CustomFunction, VerifiedSchedule
from penstock.runtime.data_parallel.replica_group import ReplicaGroup
from penstock.runtime.program.channel_ends import ChannelKey, needed_channels
from penstock.runtime.stage.stage import Stage
from penstock.runtime.torch_internals.autograd import profiler_enabled
from penstock.runtime.transport.channels import ReceiveChannel, SendChannel
from penstock.traces.diagnose.rank_state import Wait, WaitKind

Mark = TypeVar("Mark")
Work: TypeAlias = Callable[[], None]


class CallType(Enum):
    """The purpose of a call."""

    POST = "post a receive"
    WAIT = "wait for a message"
    RELEASE = "wait for a send and release its buffers"
    ACTION = "run an action"


class Call(NamedTuple):
    """One call of a program."""

    position: int
    """The index of the action in the rank's list."""
    type: CallType
    run: Work
    subject: Action | None = None
    """The receive that is posted or waited for, or the send that is released."""


@dataclass
class Progress:
    """How far a step has come; other threads read it."""

    index: int = -1
    """The index of the current call: -1 before the first, the number of calls after the last."""
    part: int = 0
    """The current part of an overlapped pair."""
    abort_requested: bool = False
    """Set by another thread when the step has failed on another rank."""


class StepAbortedError(Exception):
    """The step failed on another rank."""


class Program:
    """The calls of one rank, in order."""

    def __init__(self, schedule: Schedule, rank: int, calls: Sequence[Call], progress: Progress) -> None:
        self.schedule, self.rank = schedule, rank
        self.steps = schedule.ranks[rank]
        self.progress = progress
        self._calls = tuple(calls)

    def _name(self, call: Call) -> str:
        """The range of a call in torch's profiler: `PP:2F1` is the action alone, without what it waits for."""
        if call.type is CallType.ACTION:
            return f"PP:{self.steps[call.position]}"
        return f"{call.type.name.lower()} {call.subject}"

    def begin(self) -> None:
        """Set the progress to before the first call."""
        self.progress.index, self.progress.part = -1, 0

    def finish(self) -> None:
        """Set the progress to after the last call."""
        self.progress.index = len(self._calls)

    @property
    def started(self) -> bool:
        """Whether the first call has begun."""
        return self.progress.index >= 0

    @property
    def finished(self) -> bool:
        """Whether all calls are finished."""
        return self.progress.index >= len(self._calls)

    @property
    def current_call(self) -> Call | None:
        """The current call; None before the first and after the last."""
        return self._calls[self.progress.index] if self.started and not self.finished else None

    @property
    def position(self) -> int:
        """The index of the current action in the rank's list; -1 before the first call."""
        if self.finished:
            return len(self.steps) - 1
        return self._calls[self.progress.index].position if self.started else -1

    @property
    def awaited(self) -> Wait | None:
        """The message that the current call waits for, and its peer; None if it computes."""
        call, rank_of_stage = self.current_call, self.schedule.placement.stage_to_rank
        if call is None or call.type is CallType.POST:
            return None
        part = call.subject if call.type is not CallType.ACTION else self.steps[call.position].parts[0]
        assert part is not None, "every wait has a subject"
        if part.kind.is_send or part.kind in SEND_WAITS:
            send = replace(part, kind=part.kind.waits_for or part.kind)
            return Wait(WaitKind.SEND, str(send), rank_of_stage[part.other_end])
        if call.type is CallType.ACTION:
            return None
        forward = f"{part.other_end}F{part.microbatch}"
        what = f"the output of {forward}" if part.kind is Kind.RECV_F else f"the gradient of {forward}'s input"
        return Wait(WaitKind.RECEIVE, what, rank_of_stage[part.other_end])

    @property
    def communicates(self) -> bool:
        """Whether the current call sends, receives or waits for a message."""
        call = self.current_call
        if call is None:
            return self.finished
        return call.type is not CallType.ACTION or self.steps[call.position].parts[0].kind.is_point

    def _calls_to_run(self) -> Iterator[Call]:
        """The calls in order; raises as soon as the step is known to have failed on another rank."""
        progress = self.progress
        for index, call in enumerate(self._calls):
            progress.index = index
            if progress.abort_requested:
                raise StepAbortedError
            yield call

    def run(self) -> None:
        """Run one step. An exception of a call is raised as it is, with the progress at that call.

        If torch's profiler is active, every action and every wait is a range in it.
        """
        profiled = profiler_enabled()
        for call in self._calls_to_run():
            if profiled:
                with torch.profiler.record_function(self._name(call)):
                    call.run()
            else:
                call.run()

    def run_timed(
        self, now: Callable[[], Mark], after: Callable[[int], None] | None = None
    ) -> list[tuple[Mark, Mark]]:
        """Run one step; return the clock at the start and the end of each action of the list.

        `after` is called after each of them with its index.
        """
        start = now()
        marks = [(start, start)] * len(self.steps)
        done = 0
        for position, call_type, run, _ in self._calls_to_run():
            if call_type is not CallType.ACTION:
                run()
                continue
            begin = now()
            marks[done:position] = [(begin, begin)] * (position - done)  # actions without a call take no time
            run()
            marks[position] = begin, now()
            done = position + 1
            if after is not None:
                after(position)
        end = now()
        marks[done:] = [(end, end)] * (len(marks) - done)
        return marks


class ExecutionContext(NamedTuple):
    """What the actions of a rank work on; channels are by kind, stage and other end of their action."""

    stages: Mapping[int, Stage]
    send_channels: Mapping[ChannelKey, SendChannel]
    receive_channels: Mapping[ChannelKey, ReceiveChannel]
    functions: Mapping[Kind, CustomFunction]
    replication: ReplicaGroup
    check_call: Callable[[int], None]
    """Checks that another rank makes the same call."""
    posts_ahead: bool = False
    """Whether the next receive of a channel is posted before the wait for the one before it."""


class ActionRule(NamedTuple):
    """How actions of one kind run."""

    bind: Callable[[ExecutionContext, Action], Callable[..., None] | None]
    """Returns the function for an action, called with its microbatch if it has one; None if it does nothing."""
    needs: Kind | None = None
    """The receive whose messages the action waits for, if the stage has such channels."""


def rule_of(kind: Kind) -> ActionRule:
    """Return the rule of a kind; raise `UnhandledKindError` for a kind that the runtime does not handle."""
    return handler_of(_RULES, kind, "runtime.program")


def _microbatch(action: Action) -> int:
    assert action.microbatch is not None, "checked when the action was made"
    return action.microbatch


def channel_key(message: Action) -> ChannelKey:
    """Return the key of the channel of a SEND or RECV."""
    return message.kind, message.stage, message.other_end


def _send(context: ExecutionContext, action: Action) -> Callable[[int], None]:
    channel, stage = context.send_channels[channel_key(action)], context.stages[action.stage]
    return lambda microbatch: channel.send(microbatch, *stage.pop_value(microbatch, action.other_end))


def _wait_for_send(context: ExecutionContext, action: Action) -> Callable[[int], None]:
    assert action.kind.waits_for is not None, "a rule of waits"
    return context.send_channels[action.kind.waits_for, action.stage, action.other_end].release


def _post(context: ExecutionContext, action: Action) -> Callable[[int], None]:
    return context.receive_channels[channel_key(action)].post


def _shard_method(name: str) -> Callable[[ExecutionContext, Action], Work | None]:
    return lambda context, action: getattr(context.replication.shards.get(action.stage), name, None)


def _reduce_gradients(context: ExecutionContext, action: Action) -> Work | None:
    replication = context.replication
    return partial(replication.reduce, action.stage) if replication.reduces_stage(action.stage) else None


def _wait_for_gradients(context: ExecutionContext, action: Action) -> Work | None:
    replication = context.replication
    return partial(replication.wait, action.stage) if replication.reduces_stage(action.stage) else None


_RULES: Mapping[Kind, ActionRule] = {
    Kind.F: ActionRule(lambda context, action: context.stages[action.stage].forward, needs=Kind.RECV_F),
    Kind.B: ActionRule(lambda context, action: context.stages[action.stage].backward, needs=Kind.RECV_B),
    Kind.I: ActionRule(lambda context, action: context.stages[action.stage].backward_input, needs=Kind.RECV_B),
    Kind.W: ActionRule(lambda context, action: context.stages[action.stage].backward_weight),
    Kind.SEND_F: ActionRule(_send),
    Kind.SEND_B: ActionRule(_send),
    Kind.RECV_F: ActionRule(_post),
    Kind.RECV_B: ActionRule(_post),
    Kind.WAIT_SEND_F: ActionRule(_wait_for_send),
    Kind.WAIT_SEND_B: ActionRule(_wait_for_send),
    Kind.UNSHARD: ActionRule(_shard_method("unshard")),
    Kind.RESHARD: ActionRule(_shard_method("reshard")),
    Kind.REDUCE_GRAD: ActionRule(_reduce_gradients),
    Kind.WAIT_REDUCE_GRAD: ActionRule(_wait_for_gradients),
    Kind.RECOMPUTE: ActionRule(lambda context, action: context.stages[action.stage].recompute),
    Kind.OFFLOAD: ActionRule(lambda context, action: context.stages[action.stage].offload),
    Kind.RELOAD: ActionRule(lambda context, action: context.stages[action.stage].reload),
}


class ReleasePoints(NamedTuple):
    """When the sends of one rank are known to be received, so that their buffers can be released.

    gloo has no way to test whether a send is complete, only to wait for it. But the schedule shows it: if rank
    1 uses an activation of rank 0 and later sends a gradient to rank 0, then the gradient's arrival proves that
    the activation was received. What each rank knows about others is a vector clock that every message carries.

        rank 0   SEND a ---.              .--> uses g: a was received, release its buffer
        rank 1              '--> uses a   SEND g

    Sends and points are positions in the rank's list.
    """

    at: dict[int, list[int]]
    """Per position: the sends known to be received once the action there has its inputs."""
    at_end: list[int]
    """Sends that no later message proves to be received."""
    limits: dict[int, list[int]]
    """Per send: the earlier sends that it waits for before they are known to be received, if they are long."""


def release_points(schedule: Schedule, rank: int, most_pending: int | None = None) -> ReleasePoints:
    """The release points of a valid, lowered schedule.

    With `most_pending`, a send waits for the oldest one if so many of its channel are pending. Such a wait
    cannot deadlock only if the schedule is safe when every send blocks until it is received.
    """
    table = schedule.table
    messages = schedule.messages
    there = messages.used
    sends, consumers = table.slot[messages.send[there]], table.slot[messages.consumer[there]]
    first = int(table.slot_bounds[rank])
    known = _vector_clocks(schedule, sends, consumers, rank)
    positions = np.array(sorted(known), dtype=np.int64)
    clocks = np.array([known[slot] for slot in sorted(known)]).reshape(len(known), schedule.num_ranks)
    result = ReleasePoints({}, [], {})
    for send, consumer in sorted(zip(sends.tolist(), consumers.tolist())):
        if table.rank[send] != rank:
            continue
        # vector clocks only grow, so the first one that covers the consumer is found by bisection
        found = int(np.searchsorted(clocks[:, table.rank[consumer]], consumer, side="right")) if known else 0
        if found < len(known):
            result.at.setdefault(int(positions[found]) - first, []).append(send - first)
        else:
            result.at_end.append(send - first)
    if most_pending is None:
        return result
    return result._replace(limits=_limits(schedule, rank, result, most_pending))


def _limits(schedule: Schedule, rank: int, known: ReleasePoints, most_pending: int) -> dict[int, list[int]]:
    """Per send: the oldest one of the same channel, if there are this many of it that may be pending."""
    steps = schedule.ranks[rank]
    release_at = {send: position for position, sends in known.at.items() for send in sends}
    pending: dict[ChannelKey, list[int]] = {}
    limits: dict[int, list[int]] = {}
    for send in sorted([*release_at, *known.at_end]):
        (action,) = steps[send].parts
        queue = pending.setdefault(channel_key(action), [])
        queue[:] = [earlier for earlier in queue if release_at.get(earlier, send) >= send]
        if len(queue) == most_pending:
            limits[send] = [queue.pop(0)]
        queue.append(send)
    return limits


def _vector_clocks(schedule: Schedule, sends: Ints, consumers: Ints, rank: int) -> dict[int, Ints]:
    """Per slot of this rank that waits for a message: the last slot of every rank known to be finished."""
    table = schedule.table
    inputs = Inputs.of(schedule.num_steps, sends, consumers, np.zeros(len(sends), dtype=np.int64))
    ends = run_dataflow(table, inputs, [1] * schedule.num_steps, [0] * schedule.num_ranks).ends
    carried: dict[int, Ints] = {}
    sources: dict[int, list[int]] = {}
    for send, consumer in zip(sends.tolist(), consumers.tolist()):
        sources.setdefault(consumer, []).append(send)
    sending = set(sends.tolist())
    events = np.array(sorted(sending | set(sources)), dtype=np.int64)
    clocks = np.full((schedule.num_ranks, schedule.num_ranks), -1, dtype=np.int64)
    found: dict[int, Ints] = {}
    for slot in events[np.argsort(ends[events], kind="stable")].tolist():
        here = int(table.rank[slot])
        for source in sources.get(slot, ()):
            np.maximum(clocks[here], carried[source], out=clocks[here])
        clocks[here, here] = slot
        if slot in sending:
            carried[slot] = clocks[here].copy()
        if here == rank and slot in sources:
            found[slot] = clocks[here].copy()
    return found


_KEPT = (Kind.F, Kind.SEND_F, Kind.RECV_F, Kind.WAIT_SEND_F, Kind.UNSHARD, Kind.RESHARD)
_OMITTED = (
    *(Kind.B, Kind.I, Kind.W, Kind.SEND_B, Kind.RECV_B, Kind.WAIT_SEND_B),
    *(Kind.REDUCE_GRAD, Kind.WAIT_REDUCE_GRAD),
)


def forward_only(schedule: Schedule) -> Schedule:
    """The schedule without backward actions, gradient messages, gradient reductions and memory actions."""
    schedule.table.require_handled((*_KEPT, *_OMITTED, *MEMORY_KINDS), "runtime.program.forward_only")
    rows = [row & ~np.int64(JOINED) for row in schedule.only(_KEPT).table.rows]
    return schedule.with_rows([_without_idle_unshards(row) for row in rows])


def _without_idle_unshards(row: Ints) -> Ints:
    """Remove every UNSHARD and its RESHARD if no action of the stage is between them."""
    by_stage = np.argsort(row >> STAGE_SHIFT, kind="stable")
    stage, kind = row[by_stage] >> STAGE_SHIFT, kinds_in(row[by_stage])
    idle = (kind[:-1] == Kind.UNSHARD.number) & (kind[1:] == Kind.RESHARD.number) & (stage[:-1] == stage[1:])
    first = np.flatnonzero(idle)
    return np.delete(row, by_stage[np.concatenate((first, first + 1))])


_MAX_PENDING_SENDS = 8  # long sends per channel, where a send may block


def compile_program(verified: VerifiedSchedule, rank: int, context: ExecutionContext) -> Program:
    """Return the program of one rank.

    The buffer of a send is released by the wait for it. In a schedule without such waits it is released where
    the send is known to be received, or else at the end; if the schedule is safe with blocking sends, the
    number of pending sends is bounded as well.
    """
    schedule, progress = verified.schedule, Progress()
    releases = ReleasePoints({}, [], {})
    if schedule.num_ranks > 1 and not schedule.table.has(*SEND_WAITS):
        most_pending = _MAX_PENDING_SENDS if verified.safe_with_blocking_sends else None
        releases = release_points(schedule, rank, most_pending)
    calls = _Compiler(schedule, rank, context, progress).calls(releases)
    return Program(schedule, rank, tuple(calls), progress)


class _Compiler:
    def __init__(self, schedule: Schedule, rank: int, context: ExecutionContext, progress: Progress) -> None:
        self._schedule, self._context, self._progress = schedule, context, progress
        self._steps = schedule.ranks[rank]
        self._unposted: dict[ChannelKey, deque[Action]] = {}
        """The receives of each channel that are not posted yet, in order, if they are posted ahead."""
        if context.posts_ahead:
            for receive in (part for step in self._steps for part in step.parts if part.kind.is_receive):
                self._unposted.setdefault(channel_key(receive), deque()).append(receive)
        self._received: set[Action] = set()
        """The receives that an earlier action waits for."""
        self._checked: set[int] = set()
        """The ranks whose call is checked by now."""

    def calls(self, releases: ReleasePoints) -> Iterator[Call]:
        """Yield the calls; what is not urgent comes before the next wait, where the rank has time for it."""
        due: list[Call] = []
        for channel in self._unposted:
            yield from self._post_next(0, channel)
        for position, step in enumerate(self._steps):
            if waits := [call for part in step.parts for call in self._waits(position, part)]:
                yield from due
                due.clear()
            yield from waits
            for send in releases.limits.get(position, ()):
                yield self._release(position, send, if_long=True)
            if (work := self._work(step)) is not None:
                yield Call(position, CallType.ACTION, work)
            first = step.parts[0]
            if first.kind.is_receive and first in (unposted := self._unposted.get(channel_key(first), deque())):
                unposted.remove(first)  # posted at its own place in the list
            due += [self._release(position, send) for send in releases.at.get(position, ())]
        yield from due
        yield from (self._release(len(self._steps) - 1, send) for send in releases.at_end)

    def _post_next(self, position: int, channel: ChannelKey) -> Iterator[Call]:
        """Yield the post of the next receive of a channel, if there is one; its place in the list is later."""
        if unposted := self._unposted.get(channel):
            receive = unposted.popleft()
            post = partial(self._context.receive_channels[channel].post_ahead, _microbatch(receive))
            yield Call(position, CallType.POST, post, receive)

    def _waits(self, position: int, part: Action) -> Iterator[Call]:
        """Yield the waits for the messages that an action needs; the call of each sender is checked once."""
        needs = rule_of(part.kind).needs
        for key in () if needs is None else needed_channels(self._schedule, needs, part.stage):
            kind, stage, other = key
            receive = Action(kind, stage, part.microbatch, other)
            channel = self._context.receive_channels.get(key)
            if channel is None or receive in self._received:
                continue
            self._received.add(receive)
            yield from self._post_next(position, key)
            if channel.peer not in self._checked:
                self._checked.add(channel.peer)
                yield Call(position, CallType.WAIT, partial(self._context.check_call, channel.peer), receive)
            yield Call(position, CallType.WAIT, partial(channel.wait, _microbatch(part)), receive)

    def _release(self, position: int, earlier: int, *, if_long: bool = False) -> Call:
        (send,) = self._steps[earlier].parts
        channel = self._context.send_channels[channel_key(send)]
        release = channel.limit if if_long else channel.release
        return Call(position, CallType.RELEASE, partial(release, _microbatch(send)), send)

    def _work(self, step: Step) -> Work | None:
        """Return the call that runs an action, or the user's function for its kind; None if it does nothing."""
        if isinstance(step, Overlap):
            return self._overlap(step)
        run = rule_of(step.kind).bind(self._context, step)
        if run is not None and step.microbatch is not None:
            run = partial(run, step.microbatch)
        if (function := self._context.functions.get(step.kind)) is None:
            return run
        return partial(function, ActionCall(step, self._context.stages, run or (lambda: None)))

    def _overlap(self, pair: Overlap) -> Work:
        """Return the call that runs a pair; it sets the progress to the part that runs."""
        works = [partial(self._run_part, number, self._work(part)) for number, part in enumerate(pair.parts)]

        def run_in_order() -> None:
            for work in works:
                work()

        run, stages = run_in_order, self._context.stages
        if (function := self._context.functions.get(pair.kind)) is not None:
            parts = tuple(ActionCall(part, stages, work) for part, work in zip(pair.parts, works))
            run = partial(function, ActionCall(pair, stages, run_in_order, parts))

        def run_pair() -> None:
            run()
            self._progress.part = 0

        return run_pair

    def _run_part(self, number: int, work: Work | None) -> None:
        self._progress.part = number
        if work is not None:
            work()
