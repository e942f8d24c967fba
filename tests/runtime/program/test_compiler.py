"""Promise: a rank's list becomes calls in its order, with waits and releases where the schedule allows them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import penstock
from penstock import Kind
from penstock.runtime.config import verify_schedule
from penstock.runtime.data_parallel.replica_group import ReplicaGroup
from penstock.runtime.program.program import CallType, ExecutionContext, Program, compile_program
from penstock.runtime.stage.stage import Stage
from penstock.runtime.transport.channels import ReceiveChannel, SendChannel


class Recording:
    """Replaces a stage, a channel or a replica group, and records the calls of methods that `spec` has."""

    def __init__(self, name: str, log: list[str], spec: type) -> None:
        self._name, self._log, self._spec = name, log, spec
        self.shards: dict[int, Any] = {}
        self.peer = 1

    def __getattr__(self, method: str) -> Any:
        if not callable(getattr(self._spec, method, None)):
            raise AttributeError(f"{self._spec.__name__} has no method {method}")  # noqa: TRY004 -- as Python does

        def record(*args: Any) -> tuple[()]:
            self._log.append(f"{self._name}.{method}({', '.join(map(str, args))})")
            return ()

        return record

    def reduces_stage(self, *_: object) -> bool:
        return False


def context_of(log: list[str], functions: dict[Kind, Any] | None = None) -> ExecutionContext:
    """The context of the first of two ranks with a stage each."""
    named: Any = {
        name: Recording(name, log, spec)
        for name, spec in (
            ("stage", Stage),
            ("send", SendChannel),
            ("receive", ReceiveChannel),
            ("replication", ReplicaGroup),
        )
    }
    return ExecutionContext(
        {0: named["stage"]},
        {(Kind.SEND_F, 0, 1): named["send"]},
        {(Kind.RECV_B, 0, 1): named["receive"]},
        functions or {},
        named["replication"],
        lambda rank: log.append(f"check call of {rank}"),
    )


def test_actions_become_waits_releases_and_calls() -> None:
    log: list[str] = []
    verified = verify_schedule(penstock.build("gpipe", ranks=2, microbatches=1))
    compile_program(verified, 0, context_of(log)).run()
    assert log == [
        "stage.forward(0)",
        "stage.pop_value(0, 1)",
        "send.send(0)",
        "receive.post(0)",
        "check call of 1",
        "receive.wait(0)",
        "stage.backward(0)",
        "send.release(0)",
    ]


def test_the_next_receive_is_posted_and_buffers_are_released_before_a_wait() -> None:
    log: list[str] = []
    verified = verify_schedule(penstock.build("1f1b", ranks=2, microbatches=3))
    compile_program(verified, 0, context_of(log)._replace(posts_ahead=True)).run()
    assert log[0] == "receive.post_ahead(0)"
    wait = log.index("receive.wait(1)")
    assert log[wait - 3 : wait + 2] == [
        "receive.post(1)",  # which is done by now
        "send.release(0)",  # whose gradient has arrived
        "receive.post_ahead(2)",
        "receive.wait(1)",
        "stage.backward(1)",
    ]


def test_a_long_queue_of_sends_is_limited() -> None:
    log: list[str] = []
    verified = verify_schedule(penstock.build("gpipe", ranks=2, microbatches=10))
    compile_program(verified, 0, context_of(log)).run()
    assert [line for line in log if line.startswith("send.limit")] == ["send.limit(0)", "send.limit(1)"]
    sent = log.index("send.send(8)")
    assert log[sent - 2 : sent] == ["send.limit(0)", "stage.pop_value(8, 1)"]


def test_an_action_waits_for_the_messages_of_all_its_edges() -> None:
    log: list[str] = []
    graph = penstock.StageGraph(3, ((0, 1), (0, 2), (1, 2)))
    schedule = penstock.build("gpipe", graph=graph, ranks=3, microbatches=1)
    channels: Any = {
        (kind, stage, other): Recording(
            f"{kind.value} {stage} {other}",
            log,
            SendChannel if kind in (Kind.SEND_F, Kind.SEND_B) else ReceiveChannel,
        )
        for kind in Kind
        for stage in range(3)
        for other in range(3)
        if kind.is_communication
    }
    context = context_of(log)._replace(send_channels=channels, receive_channels=channels)
    program = compile_program(verify_schedule(schedule), 2, context._replace(stages={2: context.stages[0]}))
    waits = {str(call.subject) for call in program._calls if call.type is CallType.WAIT}
    assert waits == {"2RECV_F0<0", "2RECV_F0"}
    program.run()
    assert [line for line in log if ".wait(" in line] == ["RECV_F 2 0.wait(0)", "RECV_F 2 1.wait(0)"]


def test_a_function_runs_in_place_of_its_action() -> None:
    log: list[str] = []
    functions = {Kind.F: lambda custom: log.append(f"custom {custom.action}")}
    verified = verify_schedule(penstock.build("gpipe", ranks=2, microbatches=1))
    compile_program(verified, 0, context_of(log, functions)).run()
    assert log[0] == "custom 0F0"
    assert "stage.forward(0)" not in log


def test_the_current_part_of_an_overlapped_pair_is_known() -> None:
    parts: list[int] = []
    programs: list[Program] = []

    def record_part(_microbatch: int) -> None:
        parts.append(programs[0].progress.part)

    stages: Any = {0: SimpleNamespace(forward=record_part, backward=record_part)}
    context = context_of([])._replace(stages=stages, send_channels={}, receive_channels={})
    schedule = penstock.Schedule.parse("0F0 (0F1;0B0)OVERLAP_F_B 0B1")
    programs.append(compile_program(verify_schedule(schedule), 0, context))
    programs[0].run()
    assert parts == [0, 0, 1, 0]
