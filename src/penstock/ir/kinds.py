"""The table of action kinds: for each, its role, the resource it occupies, its cost, what it needs and what
memory it holds.

Every component reads this table: the simulator its resources and costs, `cost.memory` its memory effects,
`ir.table` its dependencies, the parser its text. To add a kind, add a member to `Kind` and a row to
`KIND_SPECS`; each component that must do something for it then raises `UnhandledKindError` until it does.
Registered beside the table are the picture (`view.kinds`), the rule of the runtime (`runtime.program.program`)
and the token of the search (`search.problem`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from penstock.errors import UnhandledKindError

T = TypeVar("T")


class Role(Enum):
    """What an action does for its rank."""

    COMPUTE = "compute"
    SEND = "send"
    RECEIVE = "receive"
    WAIT = "wait"
    COLLECTIVE = "collective"
    COPY = "copy"


class Resource(Enum):
    """What an action occupies; actions of one resource of a rank run one after the other."""

    COMPUTE = "compute"
    CHANNEL = "channel"
    COLLECTIVE = "collective"
    TO_HOST = "host link, from the device to the host"
    FROM_HOST = "host link, from the host to the device"
    RANK = "the rank: nothing after it in the list begins before it ends"


class Moment(Enum):
    """When, in the life of an action, something happens."""

    START = "start"
    END = "end"


class MemoryLine(Enum):
    """The lines into which a rank's memory is split, beside parameters, gradients and optimizer state."""

    ACTIVATIONS = "activations"
    UNSHARDED = "unsharded parameters"
    RECEIVE_BUFFERS = "receive buffers"
    SEND_BUFFERS = "send buffers"
    """From a SEND to its wait; of schedules without such waits nothing is counted."""


class StageRelation(Enum):
    """Whose action is needed, seen from the stage that needs it."""

    SAME = "the same stage"
    INPUTS = "every stage that feeds it"
    OUTPUTS = "every stage that it feeds"


@dataclass(frozen=True)
class Dependency:
    """An action needs `what`: the result of one of `kinds`, same microbatch, on the related stages.

    Consumers of one dependency are alternatives, as I and B: a stage has one of them for a microbatch.
    """

    what: str
    kinds: tuple[str, ...]
    stages: StageRelation


@dataclass(frozen=True)
class MemoryEffect:
    """Bytes an action takes (above 0) or frees: a sum of fields of `Costs`, each times a factor."""

    line: MemoryLine
    at: Moment
    bytes: Mapping[str, int]
    of: str | None = None
    """The kind whose action, of the same stage and microbatch, has the effect; None for the action itself."""


@dataclass(frozen=True)
class KindSpec:
    """One row of the table."""

    role: Role
    resource: Resource
    meaning: str
    cost: str | None = None
    """The field of `Costs` with its seconds; None for what takes no time of its own."""
    all_to_all: tuple[str, ...] = ()
    """The fields of `Costs` with its seconds on the all-to-all stream: their sum."""
    has_microbatch: bool = True
    value: str | None = None
    """Of a message: what it carries, `activation` or `gradient`."""
    other_end: StageRelation | None = None
    """Of a message, or of a wait for one: where its other end is, seen from the stage of the action."""
    waits_for: str | None = None
    """Of a wait: the kind that begins what it waits for, of the same stage and microbatch."""
    needs: tuple[Dependency, ...] = ()
    memory: tuple[MemoryEffect, ...] = ()
    frees_input_at: Moment = Moment.END
    """When the receive buffer of a message that this action consumes is free."""
    repeatable: bool = False
    """Whether it may come more than once for the same stage and microbatch."""


_ACTIVATION = Dependency("activation", ("F",), StageRelation.INPUTS)
_GRADIENT = Dependency("gradient", ("I", "B"), StageRelation.OUTPUTS)
_FORWARD = Dependency("forward", ("F",), StageRelation.SAME)
_INPUT_GRADIENT = Dependency("input gradient", ("I",), StageRelation.SAME)
# RECOMPUTE and RELOAD are needed only where there are any; what several kinds need of F has a name for each
_RECOMPUTED = Dependency("recomputed activation", ("RECOMPUTE",), StageRelation.SAME)
_RELOADED = Dependency("reloaded activation", ("RELOAD",), StageRelation.SAME)
_RELOADED_CHECKPOINT = Dependency("reloaded checkpoint", ("RELOAD",), StageRelation.SAME)
_TO_RECOMPUTE = Dependency("forward to recompute", ("F",), StageRelation.SAME)
_TO_OFFLOAD = Dependency("forward to offload", ("F",), StageRelation.SAME)
_TO_RELOAD = Dependency("offloaded activation", ("OFFLOAD",), StageRelation.SAME)


def _activations(at: Moment, of: str | None = None, **sizes: int) -> tuple[MemoryEffect, ...]:
    return (MemoryEffect(MemoryLine.ACTIVATIONS, at, sizes, of),)


def _message(role: Role, value: str, other_end: StageRelation) -> KindSpec:
    held = MemoryEffect(MemoryLine.RECEIVE_BUFFERS, Moment.START, {f"{value}_message": 1})
    memory = (held,) if role is Role.RECEIVE else ()
    meaning = f"{role.value} {value}"
    return KindSpec(role, Resource.CHANNEL, meaning, value=value, other_end=other_end, memory=memory)


def _send_wait(begun: str, value: str, other_end: StageRelation) -> KindSpec:
    meaning = f"wait for the send of {'an' if value[0] == 'a' else 'a'} {value}"
    return KindSpec(*_WAIT, meaning, value=value, other_end=other_end, waits_for=begun)


def _collective(cost: str, meaning: str, *memory: MemoryEffect, repeatable: bool = True) -> KindSpec:
    return KindSpec(
        *(Role.COLLECTIVE, Resource.COLLECTIVE, meaning, cost),
        has_microbatch=False,
        memory=memory,
        repeatable=repeatable,
    )


def _unsharded(at: Moment, factor: int) -> MemoryEffect:
    return MemoryEffect(MemoryLine.UNSHARDED, at, {"unsharded_parameters": factor})


_COMPUTE = (Role.COMPUTE, Resource.COMPUTE)
_WAIT = (Role.WAIT, Resource.RANK)

KIND_SPECS: dict[str, KindSpec] = {
    "F": KindSpec(
        *_COMPUTE,
        "forward",
        "forward",
        ("forward_all_to_all",),
        needs=(_ACTIVATION,),
        memory=_activations(Moment.START, activation=1),
        frees_input_at=Moment.START,  # from then on the input is part of the stage's activation
    ),
    "I": KindSpec(
        *_COMPUTE,
        "input gradient (dgrad)",
        "backward_input",
        ("backward_input_all_to_all",),
        needs=(_FORWARD, _GRADIENT, _RECOMPUTED, _RELOADED),
        memory=_activations(Moment.END, activation_freed_by_input=-1),
    ),
    "W": KindSpec(
        *_COMPUTE,
        "weight gradient (wgrad)",
        "backward_weight",
        ("backward_weight_all_to_all",),
        needs=(_INPUT_GRADIENT,),
        memory=_activations(Moment.END, activation=-1, activation_freed_by_input=1),
    ),
    "B": KindSpec(
        *_COMPUTE,
        "full backward: input and weight gradient",
        "backward",
        ("backward_input_all_to_all", "backward_weight_all_to_all"),
        needs=(_FORWARD, _GRADIENT, _RECOMPUTED, _RELOADED),
        memory=_activations(Moment.END, activation=-1),
    ),
    "SEND_F": _message(Role.SEND, "activation", StageRelation.OUTPUTS),
    "RECV_F": _message(Role.RECEIVE, "activation", StageRelation.INPUTS),
    "SEND_B": _message(Role.SEND, "gradient", StageRelation.INPUTS),
    "RECV_B": _message(Role.RECEIVE, "gradient", StageRelation.OUTPUTS),
    "WAIT_SEND_F": _send_wait("SEND_F", "activation", StageRelation.OUTPUTS),
    "WAIT_SEND_B": _send_wait("SEND_B", "gradient", StageRelation.INPUTS),
    "UNSHARD": _collective("unshard", "all-gather the stage's parameters", _unsharded(Moment.START, 1)),
    "RESHARD": _collective("reshard", "free the gathered parameters", _unsharded(Moment.END, -1)),
    "REDUCE_GRAD": _collective("reduce_grad", "reduce the stage's gradients over replicas", repeatable=False),
    "WAIT_REDUCE_GRAD": KindSpec(
        *(*_WAIT, "wait for the reduction of the stage's gradients"),
        has_microbatch=False,
        waits_for="REDUCE_GRAD",
    ),
    "RECOMPUTE": KindSpec(
        *_COMPUTE,
        "repeat the forward, of which F kept only the checkpoint",
        "recompute",
        ("forward_all_to_all",),
        needs=(_TO_RECOMPUTE, _RELOADED_CHECKPOINT),
        memory=(
            *_activations(Moment.START, activation=1, checkpoint=-1),
            *_activations(Moment.START, "F", activation=-1, checkpoint=1),
            *_activations(Moment.END, "OFFLOAD", offloadable=1, offloadable_checkpoint=-1),
            *_activations(Moment.START, "RELOAD", offloadable=-1, offloadable_checkpoint=1),
        ),
    ),
    "OFFLOAD": KindSpec(
        *(Role.COPY, Resource.TO_HOST, "copy what F keeps to the host, and free it"),
        needs=(_TO_OFFLOAD,),
        memory=_activations(Moment.END, offloadable=-1),
    ),
    "RELOAD": KindSpec(
        *(Role.COPY, Resource.FROM_HOST, "copy it back from the host"),
        needs=(_TO_RELOAD,),
        memory=_activations(Moment.START, offloadable=1),
    ),
    "OVERLAP_F_B": KindSpec(*_COMPUTE, "a forward and a backward in one step", "overlap", has_microbatch=False),
}
"""By text. The spec of an overlapped pair is that of its parts, but for its cost."""


class Kind(Enum):
    """What a step does. The value is its token in text; the order is its number in integer form."""

    # compute: one microbatch through one stage
    F = "F"
    I = "I"
    W = "W"
    B = "B"
    # one message between two stages on different ranks
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    # the end of a send: from here on its buffer is free
    WAIT_SEND_F = "WAIT_SEND_F"
    WAIT_SEND_B = "WAIT_SEND_B"
    # a whole stage, no microbatch
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"
    WAIT_REDUCE_GRAD = "WAIT_REDUCE_GRAD"
    # what a stage holds of one microbatch between F and its backward
    RECOMPUTE = "RECOMPUTE"
    OFFLOAD = "OFFLOAD"
    RELOAD = "RELOAD"
    # the kind of `Overlap`, never of `Action`
    OVERLAP_F_B = "OVERLAP_F_B"

    def __init__(self, token: str) -> None:
        self.number: int = len(type(self).__members__)
        self.spec = KIND_SPECS[token]
        role = self.spec.role
        self.is_compute = role is Role.COMPUTE
        self.is_backward = any(need.what in ("forward", "input gradient") for need in self.spec.needs)
        self.is_send = role is Role.SEND
        self.is_receive = role is Role.RECEIVE
        self.is_communication = self.is_send or self.is_receive
        self.is_collective = role is Role.COLLECTIVE
        self.is_host_copy = role is Role.COPY
        self.is_point = role in (Role.SEND, Role.RECEIVE, Role.WAIT)
        """Whether it takes no time of its own: a point in the list, at which its rank may be blocked."""
        self.has_microbatch = self.spec.has_microbatch

    def __str__(self) -> str:
        return self.value

    @property
    def waits_for(self) -> Kind | None:
        """The kind that begins what a wait waits for."""
        return None if self.spec.waits_for is None else Kind(self.spec.waits_for)

    @property
    def peer(self) -> Kind | None:
        """The kind at the other end of the message: SEND_F and RECV_F, SEND_B and RECV_B."""
        if not self.is_communication:
            return None
        same = (kind for kind in Kind if kind.is_communication and kind.spec.value == self.spec.value)
        return next(kind for kind in same if kind.is_send != self.is_send)


PASS_KINDS = (Kind.F, Kind.I, Kind.W, Kind.B)
"""The forward and backward passes: what every schedule orders."""

SEND_WAITS = (Kind.WAIT_SEND_F, Kind.WAIT_SEND_B)
"""The kinds that wait for a send; a schedule may have none."""

MEMORY_KINDS = (Kind.RECOMPUTE, Kind.OFFLOAD, Kind.RELOAD)
"""The kinds that change what is held between a forward and its backward."""


def require_handled(present: Collection[Kind], handled: Collection[Kind], component: str) -> None:
    """Raise `UnhandledKindError` for the first kind present that `component` does not handle."""
    for kind in present:
        if kind not in handled:
            raise UnhandledKindError(kind.value, component)


def handler_of(handlers: Mapping[Kind, T], kind: Kind, component: str) -> T:
    """What `component` has for this kind; raise `UnhandledKindError` if it has nothing."""
    require_handled((kind,), handlers, component)
    return handlers[kind]
