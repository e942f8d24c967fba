"""The compiled list of one rank: bound calls in order, and the progress through them.

A step is one loop over the calls, without decisions. An action becomes the call that runs it, after waits for
the messages that it needs. What can be done while a rank waits, it does before the wait: it posts the next
receive and releases the buffers of sends.

    2F1   receive.post(2)   send.release(0)   receive.wait(1)   stage.forward(1)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeVar

import torch

from penstock.ir.action import Action
from penstock.ir.kinds import Kind
from penstock.ir.schedule import Schedule
from penstock.runtime.torch_internals.autograd import profiler_enabled
from penstock.traces.rank_state import Wait, WaitKind

Mark = TypeVar("Mark")


class CallType(Enum):
    """The purpose of a call."""

    POST = "post a receive"
    WAIT = "wait for a message"
    RELEASE = "wait for a send and release its buffers"
    ACTION = "run an action"


class Call(NamedTuple):
    """One call of a program."""

    position: int
    """The index of the step in the rank's list."""
    type: CallType
    run: Callable[[], None]
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
        self._names = tuple(map(self._name, self._calls))

    def _name(self, call: Call) -> str:
        """The range of a call in torch's profiler: `PP:2F1` is the action alone, without what it waits for."""
        if call.type is CallType.ACTION:
            return f"PP:{self.steps[call.position]}"
        return f"{call.type.name.lower()} {call.subject}"

    # --- progress ----------------------------------------------------------------------------------

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
        """The index of the current step in the rank's list; -1 before the first call."""
        if self.finished:
            return len(self.steps) - 1
        return self._calls[self.progress.index].position if self.started else -1

    @property
    def awaited(self) -> Wait | None:
        """The message that the current call waits for, and its peer; None if it computes."""
        call, hosts = self.current_call, self.schedule.placement.stage_to_rank
        if call is None or call.type is CallType.POST:
            return None
        part = call.subject if call.type is not CallType.ACTION else self.steps[call.position].parts[0]
        assert part is not None, "every wait has a subject"
        if part.kind.is_send:
            return Wait(WaitKind.SEND, str(part), hosts[part.other_end])
        if call.type is CallType.ACTION:
            return None
        forward = f"{part.other_end}F{part.microbatch}"
        what = f"the output of {forward}" if part.kind is Kind.RECV_F else f"the gradient of {forward}'s input"
        return Wait(WaitKind.RECEIVE, what, hosts[part.other_end])

    @property
    def communicates(self) -> bool:
        """Whether the current call sends, receives or waits for a message."""
        call = self.current_call
        if call is None:
            return self.finished
        return call.type is not CallType.ACTION or self.steps[call.position].parts[0].kind.is_communication

    # --- running -----------------------------------------------------------------------------------

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
        for index, call in enumerate(self._calls_to_run()):
            if profiled:
                with torch.profiler.record_function(self._names[index]):
                    call.run()
            else:
                call.run()

    def run_timed(
        self, now: Callable[[], Mark], after: Callable[[int], None] | None = None
    ) -> list[tuple[Mark, Mark]]:
        """Run one step; gives the clock at the start and the end of each step of the list.

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
            marks[done:position] = [(begin, begin)] * (position - done)  # steps without a call take no time
            run()
            marks[position] = begin, now()
            done = position + 1
            if after is not None:
                after(position)
        end = now()
        marks[done:] = [(end, end)] * (len(marks) - done)
        return marks
