"""Promise: a program runs its calls in order, knows how far it is, and stops when the step is aborted."""

from __future__ import annotations

import pytest

import penstock
from penstock.runtime.program.program import Call, CallType, Program, Progress, StepAbortedError

STEPS = penstock.Schedule.parse("0F0 0F1 0B0 0B1")


def program_of(ran: list[int], *, fails_at: int = -1) -> Program:
    """One call for each action but the second, which has nothing to do, and a wait before the third."""
    progress = Progress()

    def call(number: int) -> None:
        ran.append(number)
        if number == fails_at:
            raise ZeroDivisionError

    calls = [
        Call(0, CallType.ACTION, lambda: call(0)),
        Call(2, CallType.WAIT, lambda: call(1), STEPS.ranks[0][2].parts[0]),
        Call(2, CallType.ACTION, lambda: call(2)),
        Call(3, CallType.ACTION, lambda: call(3)),
    ]
    program = Program(STEPS, 0, calls, progress)
    program.begin()
    return program


def test_calls_run_in_order() -> None:
    ran: list[int] = []
    program = program_of(ran)
    assert (program.started, program.finished, program.position, program.current_call) == (
        False,
        False,
        -1,
        None,
    )
    program.run()
    program.finish()
    assert ran == [0, 1, 2, 3]
    assert (program.started, program.finished, program.position, program.current_call) == (True, True, 3, None)


@pytest.mark.parametrize(("call", "position", "communicates"), [(0, 0, False), (1, 2, True), (2, 2, False)])
def test_an_exception_leaves_the_progress_at_its_call(call: int, position: int, *, communicates: bool) -> None:
    program = program_of([], fails_at=call)
    with pytest.raises(ZeroDivisionError):
        program.run()
    assert (program.progress.index, program.position) == (call, position)
    assert program.communicates is communicates


def test_an_aborted_program_stops_before_its_next_call() -> None:
    ran: list[int] = []
    program = program_of(ran)
    program.progress.abort_requested = True
    with pytest.raises(StepAbortedError):
        program.run()
    assert ran == []


def test_a_timed_run_has_the_times_of_every_step_without_its_waits() -> None:
    clock = iter(range(100))
    marks = program_of([]).run_timed(lambda: next(clock))
    assert marks == [(1, 2), (3, 3), (3, 4), (5, 6)]
