"""Compiles a rank's list of actions into a `Program` of bound calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np

from penstock.ir.action import Action, Overlap, Step
from penstock.ir.dataflow import Inputs, run_dataflow
from penstock.ir.encoding import JOINED, STAGE_SHIFT, Ints, kinds_in
from penstock.ir.kinds import MEMORY_KINDS, Kind, handler_of
from penstock.ir.schedule import Schedule
from penstock.runtime.config import Custom, CustomFunction, VerifiedSchedule
from penstock.runtime.data_parallel.replica_group import ReplicaGroup
from penstock.runtime.program.channel_ends import receiving_stage
from penstock.runtime.program.program import Call, CallType, Program, Progress
from penstock.runtime.stage.stage import Stage
from penstock.runtime.transport.channels import ReceiveChannel, SendChannel

# What the runtime does for each kind of action: the message it waits for, and the call that runs it.


Work: TypeAlias = Callable[[], None]


class ExecutionContext(NamedTuple):
    """What the actions of a rank work on; channels are by kind, stage and other end of their action."""

    stages: Mapping[int, Stage]
    send_channels: Mapping[tuple[Kind, int, int], SendChannel]
    receive_channels: Mapping[tuple[Kind, int, int], ReceiveChannel]
    functions: Mapping[Kind, CustomFunction]
    replication: ReplicaGroup
    check_call: Callable[[int], None]
    """Checks that another rank makes the same call."""
    posts_ahead: bool = False
    """Whether the next receive of a channel is posted before the wait for the one before it."""


class ActionRule(NamedTuple):
    """How actions of one kind run."""

    bind: Callable[[ExecutionContext, Action], Work | None]
    """Gives the call for an action, or None if there is nothing to do."""
    needs: Kind | None = None
    """The receive whose messages the action waits for, if the stage has such channels."""


def rule_of(kind: Kind) -> ActionRule:
    """The rule of a kind; `UnhandledKindError` for a kind that the runtime does not handle."""
    return handler_of(_RULES, kind, "runtime.execution")


def microbatch_of(action: Action) -> int:
    """The microbatch of an action that has one."""
    assert action.microbatch is not None, "checked when the action was made"
    return action.microbatch


def _forward(context: ExecutionContext, action: Action) -> Work:
    return partial(context.stages[action.stage].forward, microbatch_of(action))


def _backward(context: ExecutionContext, action: Action) -> Work:
    return partial(context.stages[action.stage].backward, microbatch_of(action))


def _backward_input(context: ExecutionContext, action: Action) -> Work:
    return partial(context.stages[action.stage].backward_input, microbatch_of(action))


def _backward_weight(context: ExecutionContext, action: Action) -> Work:
    return partial(context.stages[action.stage].backward_weight, microbatch_of(action))


def _recompute(context: ExecutionContext, action: Action) -> Work:
    return partial(context.stages[action.stage].recompute, microbatch_of(action))


def _offload(context: ExecutionContext, action: Action) -> Work:
    return partial(context.stages[action.stage].memory.offload, microbatch_of(action))


def _reload(context: ExecutionContext, action: Action) -> Work:
    return partial(context.stages[action.stage].memory.reload, microbatch_of(action))


def channel_key(message: Action) -> tuple[Kind, int, int]:
    """The key of the channel of a SEND or RECV."""
    return message.kind, message.stage, message.other_end


def _send_output(context: ExecutionContext, action: Action) -> Work:
    channel, stage = context.send_channels[channel_key(action)], context.stages[action.stage]
    microbatch, consumer = microbatch_of(action), action.other_end
    return lambda: channel.send(microbatch, *stage.pop_output(microbatch, consumer))


def _send_gradient(context: ExecutionContext, action: Action) -> Work:
    channel, stage = context.send_channels[channel_key(action)], context.stages[action.stage]
    microbatch, source = microbatch_of(action), action.other_end
    return lambda: channel.send(microbatch, *stage.pop_input_gradient(microbatch, source))


def _post_receive(context: ExecutionContext, action: Action) -> Work:
    return partial(context.receive_channels[channel_key(action)].post, microbatch_of(action))


def _unshard(context: ExecutionContext, action: Action) -> Work | None:
    shards = context.replication.shards.get(action.stage)
    return None if shards is None else shards.unshard


def _reshard(context: ExecutionContext, action: Action) -> Work | None:
    shards = context.replication.shards.get(action.stage)
    return None if shards is None else shards.reshard


def _reduce_gradients(context: ExecutionContext, action: Action) -> Work | None:
    replication = context.replication
    return partial(replication.reduce, action.stage) if replication.has(action.kind, action.stage) else None


_RULES: Mapping[Kind, ActionRule] = {
    Kind.F: ActionRule(_forward, needs=Kind.RECV_F),
    Kind.B: ActionRule(_backward, needs=Kind.RECV_B),
    Kind.I: ActionRule(_backward_input, needs=Kind.RECV_B),
    Kind.W: ActionRule(_backward_weight),
    Kind.SEND_F: ActionRule(_send_output),
    Kind.SEND_B: ActionRule(_send_gradient),
    Kind.RECV_F: ActionRule(_post_receive),
    Kind.RECV_B: ActionRule(_post_receive),
    Kind.UNSHARD: ActionRule(_unshard),
    Kind.RESHARD: ActionRule(_reshard),
    Kind.REDUCE_GRAD: ActionRule(_reduce_gradients),
    Kind.RECOMPUTE: ActionRule(_recompute),
    Kind.OFFLOAD: ActionRule(_offload),
    Kind.RELOAD: ActionRule(_reload),
}


# The points in a rank's list at which a send is known to be received, so that its buffer can be released.
#
# gloo has no way to test whether a send is complete, only to wait for it. But the schedule shows it: if rank 1
# uses an activation of rank 0 and later sends a gradient to rank 0, then the gradient's arrival proves that the
# activation was received. What each rank knows about the others is a vector clock that every message carries.
#
#     rank 0   SEND a ---.              .--> uses g: a was received, release its buffer
#     rank 1              '--> uses a   SEND g


class ReleasePoints(NamedTuple):
    """When the sends of one rank are known to be received; sends and points are positions in its list."""

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
    pending: dict[tuple[Kind, int, int], list[int]] = {}
    limits: dict[int, list[int]] = {}
    for send in sorted([*release_at, *known.at_end]):
        (action,) = steps[send].parts
        queue = pending.setdefault((action.kind, action.stage, action.other_end), [])
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


# The forward-only part of a schedule: what `eval` runs.


_KEPT = (Kind.F, Kind.SEND_F, Kind.RECV_F, Kind.UNSHARD, Kind.RESHARD)
_OMITTED = (Kind.B, Kind.I, Kind.W, Kind.SEND_B, Kind.RECV_B, Kind.REDUCE_GRAD)


def forward_only(schedule: Schedule) -> Schedule:
    """The schedule without backward actions, gradient messages, gradient reductions and memory actions."""
    schedule.table.require_handled((*_KEPT, *_OMITTED, *MEMORY_KINDS), "runtime.execution.forward_only")
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
    """The program of one rank."""
    progress = Progress()
    schedule = verified.schedule
    compiler = _Compiler(schedule, rank, context, progress)
    calls = compiler.calls(_release_points(verified, rank))
    return Program(schedule, rank, tuple(calls), progress)


def _release_points(verified: VerifiedSchedule, rank: int) -> ReleasePoints:
    """When the buffers of sends are released: where the send is known to be received, or else at the end.

    If the schedule is safe with blocking sends, the number of pending sends is bounded as well.
    """
    if verified.schedule.num_ranks == 1:
        return ReleasePoints({}, [], {})
    most_pending = _MAX_PENDING_SENDS if verified.safe_with_blocking_sends else None
    return release_points(verified.schedule, rank, most_pending)


class _Compiler:
    def __init__(self, schedule: Schedule, rank: int, context: ExecutionContext, progress: Progress) -> None:
        self._schedule, self._context, self._progress = schedule, context, progress
        self._steps = schedule.ranks[rank]
        self._unposted: dict[tuple[Kind, int, int], deque[Action]] = {}
        """The receives of each channel that are not posted yet, in order, if they are posted ahead."""
        if context.posts_ahead:
            for receive in (part for step in self._steps for part in step.parts if part.kind.is_receive):
                self._unposted.setdefault(channel_key(receive), deque()).append(receive)
        self._received: set[Action] = set()
        """The receives that an earlier action waits for."""
        self._checked: set[int] = set()
        """The ranks whose call is checked by now."""

    def calls(self, releases: ReleasePoints) -> Iterator[Call]:
        """The calls; what is not urgent comes before the next wait, where the rank has time for it."""
        due: list[Call] = []
        for channel in self._unposted:
            yield from self._post_next(0, channel)
        for position, step in enumerate(self._steps):
            waits = [call for part in step.parts for call in self._waits(position, part)]
            if waits:
                yield from due
                due.clear()
            yield from waits
            yield from (
                self._release(position, send, if_long=True) for send in releases.limits.get(position, ())
            )
            if (work := self._work(step)) is not None:
                yield Call(position, CallType.ACTION, work)
            self._reach(step.parts[0])
            due += [self._release(position, send) for send in releases.at.get(position, ())]
        yield from due
        yield from (self._release(len(self._steps) - 1, send) for send in releases.at_end)

    def _post_next(self, position: int, channel: tuple[Kind, int, int]) -> Iterator[Call]:
        """Post the next receive of a channel, if it has one; its own place in the list is later."""
        if unposted := self._unposted.get(channel):
            receive = unposted.popleft()
            post = partial(self._context.receive_channels[channel].post_ahead, microbatch_of(receive))
            yield Call(position, CallType.POST, post, receive)

    def _reach(self, part: Action) -> None:
        """At its own place in the list, a receive is posted."""
        if self._context.posts_ahead and part.kind.is_receive:
            unposted = self._unposted[channel_key(part)]
            if part in unposted:
                unposted.remove(part)

    def _waits(self, position: int, part: Action) -> Iterator[Call]:
        """The waits for the messages that an action needs from other ranks, whose calls are checked once."""
        for receive in self._needed(part):
            channel = self._context.receive_channels.get(channel_key(receive))
            if channel is None or receive in self._received:
                continue
            self._received.add(receive)
            yield from self._post_next(position, channel_key(receive))
            if channel.peer not in self._checked:
                self._checked.add(channel.peer)
                yield Call(position, CallType.WAIT, partial(self._context.check_call, channel.peer), receive)
            yield Call(position, CallType.WAIT, partial(channel.wait, microbatch_of(part)), receive)

    def _needed(self, part: Action) -> Iterator[Action]:
        """The receives of the values that an action needs, also of those that are on this rank already."""
        schedule, needs = self._schedule, rule_of(part.kind).needs
        if needs is Kind.RECV_F:
            for source in schedule.graph.inputs(part.stage):
                yield Action(needs, receiving_stage(schedule, source, part.stage), part.microbatch, source)
        elif needs is not None:
            for target in schedule.graph.outputs(part.stage):
                yield Action(needs, part.stage, part.microbatch, target)

    def _release(self, position: int, earlier: int, *, if_long: bool = False) -> Call:
        (send,) = self._steps[earlier].parts
        channel = self._context.send_channels[channel_key(send)]
        release = channel.limit if if_long else channel.release
        return Call(position, CallType.RELEASE, partial(release, microbatch_of(send)), send)

    def _work(self, step: Step) -> Work | None:
        """The call that runs a step; None if there is nothing to do."""
        if isinstance(step, Overlap):
            return self._overlap(step)
        work = rule_of(step.kind).bind(self._context, step)
        if (function := self._context.functions.get(step.kind)) is None:
            return work
        return partial(function, Custom(step, self._context.stages, work or _do_nothing))

    def _overlap(self, step: Overlap) -> Work:
        works = [self._tracked(number, self._work(part)) for number, part in enumerate(step.parts)]

        def run_in_order() -> None:
            for work in works:
                work()
            self._progress.part = 0

        if (function := self._context.functions.get(Kind.OVERLAP_F_B)) is None:
            return run_in_order
        stages = self._context.stages
        parts = tuple(Custom(part, stages, work) for part, work in zip(step.parts, works))
        return self._run_custom(function, Custom(step, stages, run_in_order, parts))

    def _run_custom(self, function: Callable[[Custom], None], custom: Custom) -> Work:
        def run_custom() -> None:
            function(custom)
            self._progress.part = 0

        return run_custom

    def _tracked(self, number: int, work: Work | None) -> Work:
        """The work of one part of an overlapped pair, which sets the progress to that part."""

        def tracked() -> None:
            self._progress.part = number
            if work is not None:
                work()

        return tracked


def _do_nothing() -> None:
    """Run an action that has nothing to do on this rank."""
