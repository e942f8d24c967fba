"""A rank's list of actions compiled once into calls that are already bound: running a step takes no decisions.

An action becomes: waits for the messages it needs, releases of sends that are certain by then, and the work.

    2F1   inbox.wait(1)   outbox.release(0)   stage.forward(1)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from penstock.action import JOINED, Action, Kind, Overlap, Step
from penstock.columns import kinds_in
from penstock.runtime.channels import Inbox, Outbox
from penstock.runtime.release import Releases, releases
from penstock.runtime.stage import Stage
from penstock.schedule import Schedule

__all__ = ["Call", "Custom", "CustomFunction", "Program", "forward_part"]

Mark = TypeVar("Mark")
WAIT, RELEASE, WORK = range(3)
_AHEAD = 4  # sends of one channel whose end nothing tells of


@dataclass(frozen=True)
class Custom:
    """What a user's function is given in place of an action."""

    action: Step
    stages: Mapping[int, Stage]
    """The stages of this rank."""
    run: Callable[[], None]
    """What would be done without the function; for an overlapped pair, its parts one after the other."""
    parts: tuple[Custom, ...] = ()
    """Of an overlapped pair: the forward and the backward, with the functions for their kinds."""


CustomFunction = Callable[[Custom], None]


class Call(NamedTuple):
    """Something to do: the place in the rank's list, what it is for, and the call."""

    place: int
    what: int
    run: Callable[[], None]


class Wires(NamedTuple):
    """What the actions of a rank work with: its stages, and the ends of its channels by kind and stage."""

    stages: Mapping[int, Stage]
    outboxes: Mapping[tuple[Kind, int], Outbox]
    inboxes: Mapping[tuple[Kind, int], Inbox]
    functions: Mapping[Kind, CustomFunction]


class Program:
    """The calls of one rank, in order."""

    def __init__(self, schedule: Schedule, rank: int, wires: Wires, *, sends_may_wait: bool) -> None:
        self.schedule, self.rank = schedule, rank
        self.steps = schedule.ranks[rank]
        self.place = 0
        """The place in the list that is being worked on."""
        self.waiting = False
        self.stop = False
        """Set by another thread when the step has failed elsewhere."""
        self._wires = wires
        self._calls = tuple(self._compiled(sends_may_wait=sends_may_wait))
        self.names = tuple(f"PP:{step}" for step in self.steps)

    # --- compiling ---------------------------------------------------------------------------------

    def _compiled(self, *, sends_may_wait: bool) -> Iterator[Call]:
        free = self._releases(sends_may_wait=sends_may_wait)
        for place, step in enumerate(self.steps):
            for part in step.parts:
                if (inbox := self._needs(part)) is not None and part.microbatch is not None:
                    yield Call(place, WAIT, partial(inbox.wait, part.microbatch))
            yield from (Call(place, RELEASE, self._release(send)) for send in free.at.get(place, ()))
            if (work := self._work(step)) is not None:
                yield Call(place, WORK, work)
        yield from (Call(len(self.steps) - 1, RELEASE, self._release(send)) for send in free.at_end)

    def _releases(self, *, sends_may_wait: bool) -> Releases:
        """When the buffers of sends are free.

        Where nothing tells, a send waits for the fourth before it on its channel, if the schedule is proved to
        run even when every send waits; else all wait at the end.
        """
        if self.schedule.num_ranks == 1:
            return Releases({}, [])
        free = releases(self.schedule, self.rank)
        if not sends_may_wait:
            return free
        queues: dict[tuple[Kind, int], list[int]] = {}
        for send in free.at_end:
            (action,) = self.steps[send].parts
            queue = queues.setdefault((action.kind, action.stage), [])
            queue.append(send)
            if len(queue) > _AHEAD:
                free.at.setdefault(send, []).append(queue.pop(0))
        return Releases(free.at, [send for queue in queues.values() for send in queue])

    def _needs(self, part: Action) -> Inbox | None:
        """The channel whose message this part waits for."""
        if part.kind is Kind.F:
            return self._wires.inboxes.get((Kind.RECV_F, part.stage))
        if part.kind in (Kind.B, Kind.I):
            return self._wires.inboxes.get((Kind.RECV_B, part.stage))
        return None

    def _release(self, place: int) -> Callable[[], None]:
        (send,) = self.steps[place].parts
        assert send.microbatch is not None
        return partial(self._wires.outboxes[send.kind, send.stage].release, send.microbatch)

    def _work(self, step: Step) -> Callable[[], None] | None:
        """The call for a step, None when there is nothing to do."""
        if isinstance(step, Overlap):
            return self._overlap(step)
        work = self._builtin(step)
        if (function := self._wires.functions.get(step.kind)) is None:
            return work
        return partial(function, Custom(step, self._wires.stages, work or _nothing))

    def _overlap(self, step: Overlap) -> Callable[[], None]:
        works = [self._work(part) or _nothing for part in step.parts]

        def one_after_the_other() -> None:
            for work in works:
                work()

        if (function := self._wires.functions.get(Kind.OVERLAP_F_B)) is None:
            return one_after_the_other
        stages = self._wires.stages
        parts = tuple(Custom(part, stages, work) for part, work in zip(step.parts, works))
        return partial(function, Custom(step, stages, one_after_the_other, parts))

    def _builtin(self, action: Action) -> Callable[[], None] | None:
        wires, kind, microbatch = self._wires, action.kind, action.microbatch
        if kind.is_send:
            assert microbatch is not None
            return partial(wires.outboxes[kind, action.stage].send, microbatch)
        if kind.is_receive:
            assert microbatch is not None
            return partial(wires.inboxes[kind, action.stage].post, microbatch)
        stage = wires.stages[action.stage]
        work: dict[Kind, Callable[[int], None]] = {
            Kind.F: stage.forward,
            Kind.B: stage.backward,
            Kind.I: stage.backward_input,
            Kind.W: stage.backward_weight,
        }
        return partial(work[kind], microbatch) if microbatch is not None and kind in work else None

    # --- running -----------------------------------------------------------------------------------

    def run(self) -> None:
        """One step. Raises what a call raises, with `place` standing where that was."""
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]  # noqa: SLF001 -- the only way to ask
            return self._run_named()
        for place, what, call in self._calls:
            self.place = place
            self.waiting = what == WAIT
            if self.stop:
                raise StoppedError
            call()
        return None

    def _run_named(self) -> None:
        """The same, with a profiler's range around each action."""
        for place, what, call in self._calls:
            self.place, self.waiting = place, what == WAIT
            if self.stop:
                raise StoppedError
            with _range(self.names[place]):
                call()

    def run_timed(self, now: Callable[[], Mark]) -> list[tuple[Mark, Mark]]:
        """The same, and marks of a clock at the beginning and the end of each step."""
        nothing = now()
        marks = [(nothing, nothing)] * len(self.steps)
        done = 0
        for place, what, call in self._calls:
            self.place, self.waiting = place, what == WAIT
            if self.stop:
                raise StoppedError
            if what != WORK:
                call()
                continue
            begin = now()
            marks[done:place] = [(begin, begin)] * (place - done)  # steps without work take no time
            call()
            marks[place] = begin, now()
            done = place + 1
        end = now()
        marks[done:] = [(end, end)] * (len(marks) - done)
        return marks


class StoppedError(Exception):
    """The step failed on another rank."""


def _range(name: str) -> AbstractContextManager[Any]:
    return torch.profiler.record_function(name)


def _nothing() -> None:
    """What an action does that has nothing to do."""


def forward_part(schedule: Schedule) -> Schedule:
    """The same schedule without everything that is for gradients: what `eval` runs."""
    kept = (Kind.F, Kind.SEND_F, Kind.RECV_F, Kind.UNSHARD, Kind.RESHARD)
    numbers = [kind.number for kind in kept]
    rows = [row[np.isin(kinds_in(row), numbers)] & ~np.int64(JOINED) for row in schedule.columns.rows]
    return schedule.with_rows(rows)
