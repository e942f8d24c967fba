"""A rank's list of actions compiled once into calls that are already bound: running a step takes no decisions.

An action becomes: waits for the messages it needs, releases of sends that are certain by then, and the work.

    2F1   inbox.wait(1)   outbox.release(0)   stage.forward(1)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from penstock.ir.action import JOINED, STAGE_SHIFT, Action, Kind, Overlap, Step
from penstock.ir.schedule import Schedule
from penstock.ir.table import Ints, kinds_in
from penstock.runtime.data_parallel.replica_group import ReplicaGroup
from penstock.runtime.execution.stage import Stage
from penstock.runtime.transport.channels import Inbox, Outbox
from penstock.runtime.transport.release import Releases, releases

__all__ = ["Call", "Custom", "CustomFunction", "Program", "forward_part"]

Mark = TypeVar("Mark")
WAIT, RELEASE, WORK = range(3)
_AHEAD = 8  # sends of one channel that may be under way where sends may wait


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
    """Something to do: the place in the rank's list, what it is, and the call."""

    place: int
    what: int
    run: Callable[[], None]
    about: Action | None = None
    """What waits for a message, or the send whose end is waited for."""


class Wires(NamedTuple):
    """What the actions of a rank work with: its stages, and the ends of its channels by kind and stage."""

    stages: Mapping[int, Stage]
    outboxes: Mapping[tuple[Kind, int], Outbox]
    inboxes: Mapping[tuple[Kind, int], Inbox]
    functions: Mapping[Kind, CustomFunction]
    replication: ReplicaGroup


class Program:
    """The calls of one rank, in order."""

    def __init__(self, schedule: Schedule, rank: int, wires: Wires, *, sends_may_wait: bool) -> None:
        self.schedule, self.rank = schedule, rank
        self.steps = schedule.ranks[rank]
        self.at = -1
        """The call at hand: -1 before the first, behind the last while the losses are shared."""
        self.part = 0
        """Which part of an overlapped pair is being worked on."""
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
                    yield Call(place, WAIT, partial(inbox.wait, part.microbatch), part)
            yield from (self._release(place, send) for send in free.at.get(place, ()))
            if (work := self._work(step)) is not None:
                yield Call(place, WORK, work)
        yield from (self._release(len(self.steps) - 1, send) for send in free.at_end)

    def _releases(self, *, sends_may_wait: bool) -> Releases:
        """When the buffers of sends are free.

        Where the schedule is proved to run even when every send waits, at most eight of a channel are under
        way: the next one waits for the first. Else a send is waited for where it is certain, or at the end.
        """
        if self.schedule.num_ranks == 1:
            return Releases({}, [])
        certain = releases(self.schedule, self.rank)
        if not sends_may_wait:
            return certain
        release_at = {send: place for place, sends in certain.at.items() for send in sends}
        under_way: dict[tuple[Kind, int], list[int]] = {}
        for send in sorted([*release_at, *certain.at_end]):
            (action,) = self.steps[send].parts
            queue = under_way.setdefault((action.kind, action.stage), [])
            queue[:] = [earlier for earlier in queue if release_at.get(earlier, send) >= send]
            if len(queue) == _AHEAD:
                release_at[queue.pop(0)] = send
            queue.append(send)
        found = Releases({}, [send for send in certain.at_end if send not in release_at])
        for send, place in release_at.items():
            found.at.setdefault(place, []).append(send)
        return found

    def _needs(self, part: Action) -> Inbox | None:
        """The channel whose message this part waits for."""
        if part.kind is Kind.F:
            return self._wires.inboxes.get((Kind.RECV_F, part.stage))
        if part.kind in (Kind.B, Kind.I):
            return self._wires.inboxes.get((Kind.RECV_B, part.stage))
        return None

    def _release(self, place: int, earlier: int) -> Call:
        (send,) = self.steps[earlier].parts
        assert send.microbatch is not None
        outbox = self._wires.outboxes[send.kind, send.stage]
        return Call(place, RELEASE, partial(outbox.release, send.microbatch), send)

    def _work(self, step: Step) -> Callable[[], None] | None:
        """The call for a step, None when there is nothing to do."""
        if isinstance(step, Overlap):
            return self._overlap(step)
        work = self._builtin(step)
        if (function := self._wires.functions.get(step.kind)) is None:
            return work
        return partial(function, Custom(step, self._wires.stages, work or _nothing))

    def _overlap(self, step: Overlap) -> Callable[[], None]:
        works = [self._noted(number, self._work(part)) for number, part in enumerate(step.parts)]

        def one_after_the_other() -> None:
            for work in works:
                work()
            self.part = 0

        if (function := self._wires.functions.get(Kind.OVERLAP_F_B)) is None:
            return one_after_the_other
        stages = self._wires.stages
        parts = tuple(Custom(part, stages, work) for part, work in zip(step.parts, works))
        custom = Custom(step, stages, one_after_the_other, parts)

        def stood_in() -> None:
            function(custom)
            self.part = 0

        return stood_in

    def _noted(self, number: int, work: Callable[[], None] | None) -> Callable[[], None]:
        """The work of a part of a pair, which is then known to be at hand."""

        def noted() -> None:
            self.part = number
            if work is not None:
                work()

        return noted

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
        if microbatch is not None:
            return partial(work[kind], microbatch)
        return self._of_whole_stage(kind, action.stage)

    def _of_whole_stage(self, kind: Kind, stage: int) -> Callable[[], None] | None:
        replication = self._wires.replication
        if not replication.has(kind, stage):
            return None
        if kind is Kind.REDUCE_GRAD:
            return partial(replication.reduce, stage)
        shards = replication.shards[stage]
        return shards.unshard if kind is Kind.UNSHARD else shards.reshard

    # --- where it stands ---------------------------------------------------------------------------

    def begin(self) -> None:
        """Before the first call."""
        self.at, self.part = -1, 0

    def finish(self) -> None:
        """Behind the last call."""
        self.at = len(self._calls)

    @property
    def call(self) -> Call | None:
        """The call at hand, if it stands at one."""
        return self._calls[self.at] if 0 <= self.at < len(self._calls) else None

    @property
    def place(self) -> int:
        """The place in the list that is being worked on: -1 before the first."""
        if self.at >= len(self._calls):
            return len(self.steps) - 1
        return self._calls[self.at].place if self.at >= 0 else -1

    @property
    def finished(self) -> bool:
        """Whether all is done but to share the losses."""
        return self.at >= len(self._calls)

    @property
    def communicates(self) -> bool:
        """Whether what is at hand sends, receives or waits for a message."""
        call = self.call
        if call is None:
            return self.finished
        return call.what != WORK or self.steps[call.place].parts[0].kind.is_communication

    # --- running -----------------------------------------------------------------------------------

    def _walk(self) -> Iterator[Call]:
        """The calls, one after the other, until the step is found to have failed elsewhere."""
        for at, call in enumerate(self._calls):
            self.at = at
            if self.stop:
                raise StoppedError
            yield call

    def run(self) -> None:
        """One step. Raises what a call raises, with `place` standing where that was.

        With a profiler on, every action is a range of it.
        """
        named = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]  # noqa: SLF001 -- the only way to ask
        for place, _, call, _ in self._walk():
            if named:
                with torch.profiler.record_function(self.names[place]):
                    call()
            else:
                call()

    def run_timed(self, now: Callable[[], Mark]) -> list[tuple[Mark, Mark]]:
        """The same, and marks of a clock at the beginning and the end of each step."""
        nothing = now()
        marks = [(nothing, nothing)] * len(self.steps)
        done = 0
        for place, what, call, _ in self._walk():
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


def _nothing() -> None:
    """What an action does that has nothing to do."""


def forward_part(schedule: Schedule) -> Schedule:
    """The same schedule without everything that is for gradients: what `eval` runs."""
    kept = (Kind.F, Kind.SEND_F, Kind.RECV_F, Kind.UNSHARD, Kind.RESHARD)
    numbers = [kind.number for kind in kept]
    rows = [row[np.isin(kinds_in(row), numbers)] & ~np.int64(JOINED) for row in schedule.table.rows]
    return schedule.with_rows([_without_idle_unshards(row) for row in rows])


def _without_idle_unshards(row: Ints) -> Ints:
    """Without every UNSHARD and its RESHARD between which nothing computes."""
    by_stage = np.argsort(row >> STAGE_SHIFT, kind="stable")
    stage, kind = row[by_stage] >> STAGE_SHIFT, kinds_in(row[by_stage])
    idle = (kind[:-1] == Kind.UNSHARD.number) & (kind[1:] == Kind.RESHARD.number) & (stage[:-1] == stage[1:])
    first = np.flatnonzero(idle)
    return np.delete(row, by_stage[np.concatenate((first, first + 1))])
