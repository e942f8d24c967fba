"""Promises of the table of kinds: every kind has its row, and no part of Penstock ignores an unknown one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import penstock
from penstock import Costs, Schedule
from penstock.cost.costs import Costs as AllCosts
from penstock.errors import ActionError, UnhandledKindError
from penstock.ir.action import Action, chain_neighbour
from penstock.ir.encoding import PORT_SHIFT, decode, encode
from penstock.ir.graph import StageGraph
from penstock.ir.kinds import (
    KIND_SPECS,
    SEND_WAITS,
    Kind,
    KindSpec,
    MemoryLine,
    Resource,
    Role,
    StageRelation,
    handler_of,
)
from penstock.lowering import DeferReceives
from penstock.search.problem import Problem
from penstock.simulation.simulator import Simulator
from penstock.simulation.timeline import Timeline
from penstock.view.grid import grid
from penstock.view.html import html
from penstock.view.perfetto import trace
from penstock.view.svg import svg

pytest.importorskip("torch", reason="the runtime is one of the components")
from penstock.pipelining._orders import order_of
from penstock.runtime.program.program import forward_only, rule_of

MADE_UP = "MADE_UP"


def test_every_kind_has_a_row_and_every_row_a_kind() -> None:
    assert [kind.value for kind in Kind] == list(KIND_SPECS)
    assert [kind.number for kind in Kind] == list(range(len(Kind)))


def test_costs_and_bytes_of_the_table_are_fields_of_costs() -> None:
    fields = {*AllCosts.__dataclass_fields__, "offloadable_checkpoint"}  # the one that follows from others
    for spec in KIND_SPECS.values():
        assert spec.cost is None or spec.cost in fields
        assert {name for effect in spec.memory for name in effect.bytes} <= fields
        assert {effect.of for effect in spec.memory} - {None} <= set(KIND_SPECS)


def test_what_a_stage_takes_it_frees() -> None:
    per_stage = (MemoryLine.ACTIVATIONS, MemoryLine.UNSHARDED)
    for way in (
        *(("F", "B"), ("F", "I", "W"), ("UNSHARD", "RESHARD")),
        *(("F", "RECOMPUTE", "B"), ("F", "OFFLOAD", "RELOAD", "I", "W")),
    ):
        total: dict[str, int] = {}
        for effect in (
            effect
            for kind in way
            for effect in KIND_SPECS[kind].memory
            if effect.line in per_stage and effect.of in (None, *way)
        ):
            for name, factor in effect.bytes.items():
                total[name] = total.get(name, 0) + factor
        assert set(total.values()) == {0}


def test_messages_have_two_ends() -> None:
    assert {kind.value: kind.peer.value for kind in Kind if kind.peer} == {
        "SEND_F": "RECV_F",
        "RECV_F": "SEND_F",
        "SEND_B": "RECV_B",
        "RECV_B": "SEND_B",
    }


def test_a_missing_handler_names_the_kind_and_the_part() -> None:
    with pytest.raises(UnhandledKindError, match=r"view\.grid does not handle actions of kind RESHARD"):
        handler_of({Kind.F: 1}, Kind.RESHARD, "view.grid")


def add_kind(monkeypatch: pytest.MonkeyPatch, spec: KindSpec) -> Kind:
    """Add a kind that only the table knows, while the test runs."""
    monkeypatch.setitem(KIND_SPECS, MADE_UP, spec)
    kind = object.__new__(Kind)
    kind._name_ = kind._value_ = MADE_UP
    kind.__init__(MADE_UP)  # type: ignore[misc]
    monkeypatch.setitem(Kind._member_map_, MADE_UP, kind)
    monkeypatch.setitem(Kind._value2member_map_, MADE_UP, kind)
    monkeypatch.setattr(Kind, "_member_names_", [*Kind._member_names_, MADE_UP])
    return kind


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Schedule:
    """A valid schedule with one action of a kind of compute that only the table knows."""
    kind = add_kind(monkeypatch, KindSpec(Role.COMPUTE, Resource.COMPUTE, "a kind for a test", "forward"))
    return Schedule([[Action(Kind.F, 0, 0), Action(kind, 0, 0), Action(Kind.B, 0, 0)]])


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Kind:
    """A kind that waits for the send of an activation, which only the table knows."""
    return add_kind(
        monkeypatch,
        KindSpec(
            *(Role.WAIT, Resource.CHANNEL, "wait for the send of an activation"),
            value="activation",
            other_end=StageRelation.OUTPUTS,
        ),
    )


@pytest.fixture
def waiting(wait: Kind) -> Schedule:
    """A lowered schedule of two ranks in which the first waits for its send."""
    rows = [list(row) for row in penstock.lower(Schedule.parse("0F0 0B0 | 1F0 1B0")).ranks]
    send = next(i for i, step in enumerate(rows[0]) if step.kind is Kind.SEND_F)
    return Schedule([[*rows[0][: send + 1], Action(wait, 0, 0), *rows[0][send + 1 :]], rows[1]])


COMPONENTS: dict[str, Callable[[Schedule], object]] = {
    "validation": penstock.validate,
    "lowering": penstock.lower,
    "simulate": penstock.simulate,
    "network engine": lambda schedule: Simulator(schedule, Costs(bandwidth=1.0)),
    "search": lambda schedule: Problem(schedule.placement, 1, Costs()).order_of(schedule),
    "grid": grid,
    "html": lambda schedule: html([drawn(schedule)]),
    "svg": lambda schedule: svg([drawn(schedule)]),
    "trace": lambda schedule: trace([drawn(schedule)]),
    "runtime": lambda schedule: [rule_of(step.kind) for step in schedule.ranks[0]],
    "eval": forward_only,
    "drop-in": order_of,
}


def drawn(schedule: Schedule) -> Timeline:
    """A timeline in which every step takes one second."""
    start = np.arange(schedule.num_steps, dtype=np.float64)
    return Timeline(schedule, Costs(), start, start + 1)


@pytest.mark.parametrize("component", COMPONENTS)
def test_an_unknown_kind_raises(component: str, made_up: Schedule) -> None:
    with pytest.raises(UnhandledKindError, match=MADE_UP):
        COMPONENTS[component](made_up)


@pytest.mark.parametrize("component", COMPONENTS)
def test_an_unknown_wait_raises(component: str, waiting: Schedule) -> None:
    with pytest.raises(UnhandledKindError, match=MADE_UP):
        COMPONENTS[component](waiting)


def test_a_wait_is_no_message_and_needs_no_more_than_its_row(wait: Kind, waiting: Schedule) -> None:
    assert (wait.spec.role, wait.peer) == (Role.WAIT, None)
    assert not wait.is_communication
    plain = Schedule([[step for step in row if step.kind is not wait] for row in waiting.ranks])
    assert waiting.messages.in_order
    assert len(waiting.messages.in_lists[0]) == len(plain.messages.in_lists[0]) == 4
    codes = list(encode(waiting.ranks[0], waiting.graph))
    assert tuple(decode(codes, waiting.graph)) == waiting.ranks[0]
    assert waiting.texts(0) == [str(step) for step in waiting.ranks[0]]
    deferred = DeferReceives()(waiting)
    assert [str(step) for step in deferred.ranks[0]] == [str(step) for step in waiting.ranks[0]]


def test_the_other_end_of_a_wait_for_a_send_is_that_of_the_send(wait: Kind) -> None:
    graph = StageGraph(3, ((0, 1), (1, 2), (0, 2)))
    assert Action(wait, 0, 0).other_end == Action(Kind.SEND_F, 0, 0).other_end == 1
    off_chain = Action(wait, 0, 0, peer=2)
    assert str(off_chain) == f"0{MADE_UP}0>2"
    (code,) = encode([off_chain], graph)
    (send,) = encode([Action(Kind.SEND_F, 0, 0, peer=2)], graph)
    assert code >> PORT_SHIFT == send >> PORT_SHIFT == 1
    assert list(decode([code], graph)) == [off_chain]


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind.spec.other_end is None], ids=str)
def test_what_is_no_message_has_no_other_end(kind: Kind) -> None:
    with pytest.raises(ActionError, match="it has no other end"):
        chain_neighbour(kind, 0)
    if kind is not Kind.OVERLAP_F_B:
        with pytest.raises(ActionError, match="it has no other end"):
            _ = Action(kind, 0, 0 if kind.has_microbatch else None).other_end


def test_every_kind_has_its_role_and_the_resource_of_the_role() -> None:
    resources = {
        Role.COMPUTE: {Resource.COMPUTE},
        Role.SEND: {Resource.CHANNEL},
        Role.RECEIVE: {Resource.CHANNEL},
        Role.COLLECTIVE: {Resource.COLLECTIVE},
        Role.COPY: {Resource.TO_HOST, Resource.FROM_HOST},
        Role.WAIT: {Resource.RANK},
    }
    for kind in Kind:
        assert kind.spec.resource in resources[kind.spec.role]
        assert (kind.spec.other_end is not None) == (kind.spec.value is not None)
        assert kind.is_communication or kind.spec.other_end is None or kind in SEND_WAITS
        assert (kind.waits_for is not None) == (kind.spec.role is Role.WAIT)


def test_prices_and_memory_follow_from_the_table_alone(made_up: Schedule) -> None:
    from penstock.cost.memory import memory_over_time  # noqa: PLC0415
    from penstock.cost.prices import step_seconds  # noqa: PLC0415

    seconds = step_seconds(made_up.table, Costs(forward=3))
    assert seconds.tolist() == [3, 3, 2]
    end = seconds.cumsum()
    (memory,) = memory_over_time(made_up.table, made_up.messages, Costs(), end - seconds, end)
    assert memory.peak == 1
