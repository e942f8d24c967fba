"""The state of this rank in a `Pipeline`: its connection, its place in its list, what it knows of others."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path

from penstock.errors import FailureKind
from penstock.runtime.config import ExecutionConfig
from penstock.runtime.failure.monitor import FailureCause
from penstock.runtime.failure.watch import SILENT_SECONDS
from penstock.runtime.program.program import CallType
from penstock.runtime.session.connection import Connection
from penstock.runtime.states.writer import flush_states, register_states, request_states
from penstock.traces.rank_state import RankState


class PipelineState:
    """The source of the state files of one pipeline; without a folder it writes none."""

    def __init__(self, config: ExecutionConfig) -> None:
        self._nothing = RankState(tuple(config.members), config.members[config.rank], config.schedule)
        self._connection: weakref.ref[Connection] | None = None
        self.completed = (0, 0)
        """Calls of step and eval, and steps."""
        self.is_connecting = False
        self._writes = config.state_dir is not None
        if config.state_dir is not None:
            register_states(self, Path(config.state_dir))

    def use(self, connection: Connection) -> None:
        """Show this connection from now on, and its failure when it becomes known."""
        self._connection = weakref.ref(connection)
        connection.on_failure = weakref.WeakMethod(self._failed) if self._writes else None

    def _failed(self, cause: FailureCause) -> None:
        """Write the state at the moment at which a failure becomes known; called on any thread."""
        is_exception = cause.kind in (FailureKind.EXCEPTION, FailureKind.INTERRUPTED)
        own = is_exception and cause.world_rank == self._nothing.world_rank
        state = replace(self.rank_state(), error=cause.message, is_origin=own)
        request_states(f"failure: {cause.kind}", state, self)

    def connecting_failed(self, error: BaseException) -> None:
        """Write the state of a rank that could not connect, and why."""
        if self._writes:
            request_states("connecting failed", replace(self.rank_state(), error=str(error)), self)
            flush_states()

    def flush(self) -> None:
        """Wait until the state of a failed step is written."""
        if self._writes:
            flush_states()

    def rank_state(self) -> RankState:
        """What this rank does."""
        connection = None if self._connection is None else self._connection()
        if connection is None or self.is_connecting:
            mode = "connecting" if self.is_connecting else "outside"
            calls, steps = self.completed
            return replace(self._nothing, mode=mode, step_number=steps, call_number=calls)
        mode = connection.mode
        base = replace(
            self._nothing,
            mode=mode,
            step_number=connection.steps,
            call_number=connection.step,
            lost=_lost(connection),
        )
        program = connection.programs.get(mode)
        if program is None:
            return replace(base, waiting_for=connection.waiting_for if mode != "outside" else None)
        base = replace(base, schedule=program.schedule)
        call = program.current_call
        if call is None:
            position = len(program.steps) if program.finished else -1
            return replace(base, position=position, waiting_for=connection.awaited(program))
        awaits = "" if call.type in (CallType.POST, CallType.ACTION) else str(call.subject)
        return replace(base, position=call.position, awaits=awaits)

    def ask_others(self) -> None:
        """Ask all ranks of the job for their states."""
        connection = None if self._connection is None else self._connection()
        if connection is not None and connection.monitor is not None:
            connection.monitor.watch.send({"type": "state", "rank": self._nothing.world_rank})


def _lost(connection: Connection) -> dict[int, str]:
    """The world ranks of the pipeline whose process has ended or is silent."""
    if connection.monitor is None:
        return {}
    watch = connection.monitor.watch
    found = {}
    for rank in connection.config.members:
        if (ended := watch.ended.get(rank)) is not None:
            found[rank] = str(ended)
        elif watch.silence(rank) > SILENT_SECONDS:
            found[rank] = watch.describe_silence(rank)
    return found
