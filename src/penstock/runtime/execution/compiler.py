"""Compiles a rank's list of actions into a `Program` of bound calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

from penstock.ir.action import Action, Kind, Overlap, Step
from penstock.ir.schedule import Schedule
from penstock.runtime.execution.action_rules import (
    ExecutionContext,
    Work,
    channel_key,
    microbatch_of,
    rule_of,
)
from penstock.runtime.execution.channel_ends import receiving_stage
from penstock.runtime.execution.custom_function import Custom
from penstock.runtime.execution.program import Call, CallType, Program, Progress
from penstock.runtime.execution.verified_schedule import VerifiedSchedule
from penstock.runtime.transport.buffer_release import ReleasePoints, release_points

__all__ = ["compile_program"]

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
