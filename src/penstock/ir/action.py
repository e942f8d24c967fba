"""One step of work on one rank: its kind, its stage, its microbatch, and its text.

    2F0                    stage 2, forward, microbatch 0
    1I3  1W3  0B2          input gradient, weight gradient, both at once
    3SEND_F1  2RECV_B0     an activation leaves stage 3; a gradient reaches stage 2
    1UNSHARD  0REDUCE_GRAD one stage, no microbatch
    (0F7;7B3)OVERLAP_F_B   a forward and a backward run as one

The same in integers, for hot loops: a part is one `int`, an overlapped pair is two parts in a row
of which the second is marked as joined to the first.

    bit   58 ......... 32 31 ............ 6 5 ... 1   0
          stage           microbatch        kind      joined
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from penstock.arguments import printable, whole_number
from penstock.errors import ActionError

__all__ = ["MAX_ID", "Action", "Kind", "Overlap", "Step", "parse_action"]

MAX_ID = (1 << 26) - 1
"""The largest stage or microbatch number."""


class Kind(Enum):
    """What a step does. The value is its token in text; the order is its number in integer form."""

    # compute: one microbatch through one stage
    F = "F"  # forward
    I = "I"  # backward for the input: the gradient that the previous stage waits for
    W = "W"  # backward for the weights: what I put off
    B = "B"  # I and W in one
    # one message between neighbouring stages on different ranks
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    # a whole stage, no microbatch
    UNSHARD = "UNSHARD"  # gather the stage's parameters
    RESHARD = "RESHARD"  # let go of what UNSHARD gathered
    REDUCE_GRAD = "REDUCE_GRAD"  # sum the stage's gradients over replicas
    # a forward and a backward as one: the kind of `Overlap`, never of `Action`
    OVERLAP_F_B = "OVERLAP_F_B"

    def __init__(self, token: str) -> None:
        self.number: int = len(type(self).__members__)
        self.is_compute = token in ("F", "I", "W", "B", "OVERLAP_F_B")
        self.is_backward = token in ("I", "W", "B")
        self.is_send = token.startswith("SEND_")
        self.is_receive = token.startswith("RECV_")
        self.is_communication = self.is_send or self.is_receive
        self.has_microbatch = token in ("F", "I", "W", "B") or self.is_communication

    def __str__(self) -> str:
        return self.value

    @property
    def peer(self) -> Kind | None:
        """The kind at the other end of the message: SEND_F and RECV_F, SEND_B and RECV_B."""
        return _PEERS.get(self)


_PEERS = {
    Kind.SEND_F: Kind.RECV_F,
    Kind.RECV_F: Kind.SEND_F,
    Kind.SEND_B: Kind.RECV_B,
    Kind.RECV_B: Kind.SEND_B,
}
_KINDS = tuple(Kind)


@dataclass(frozen=True, slots=True)
class Action:
    """One step of work: `Action(Kind.F, stage=2, microbatch=0)` is `2F0`."""

    kind: Kind
    stage: int
    microbatch: int | None = None

    def __post_init__(self) -> None:
        if self.kind is Kind.OVERLAP_F_B:
            raise ActionError("OVERLAP_F_B", 0, "an overlapped pair is an Overlap(forward, backward)")
        if (self.microbatch is not None) != self.kind.has_microbatch:
            needs = "needs a microbatch" if self.kind.has_microbatch else "has no microbatch"
            raise ActionError(str(self), 0, f"{self.kind} {needs}")
        for name in ("stage", "microbatch"):
            number = getattr(self, name)
            if number is None:
                continue
            whole = number if type(number) is int else whole_number(number)
            if whole is None or not 0 <= whole <= MAX_ID:
                reason = f"{name} {printable(repr(number))} is not in 0..{MAX_ID}"
                raise ActionError(str(self), 0, reason)
            if whole is not number:
                object.__setattr__(self, name, whole)

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{'' if self.microbatch is None else self.microbatch}"

    @property
    def parts(self) -> tuple[Action, ...]:
        """The actions this step is made of: itself."""
        return (self,)


@dataclass(frozen=True, slots=True)
class Overlap:
    """A forward and a backward run as one step, so that one's communication hides behind the other."""

    forward: Action
    backward: Action

    def __post_init__(self) -> None:
        if not (isinstance(self.forward, Action) and isinstance(self.backward, Action)):
            raise ActionError(str(self), 0, "an overlap is made of two actions")
        if self.forward.kind is not Kind.F:
            raise ActionError(str(self), 1, "the first part of an overlap is a forward (F)")
        if self.backward.kind not in (Kind.B, Kind.I):
            position = str(self).index(";") + 1
            raise ActionError(str(self), position, "the second part of an overlap is a backward (B or I)")

    def __str__(self) -> str:
        return f"({self.forward};{self.backward}){Kind.OVERLAP_F_B}"

    @property
    def kind(self) -> Kind:
        """`Kind.OVERLAP_F_B`."""
        return Kind.OVERLAP_F_B

    @property
    def parts(self) -> tuple[Action, ...]:
        """The forward, then the backward."""
        return (self.forward, self.backward)


Step: TypeAlias = Action | Overlap
"""What a rank's list holds."""


# --- text ------------------------------------------------------------------------------------------

_NUMBER = r"(?:0|[1-9][0-9]{0,7})"
_WITH_MICROBATCH = "|".join(kind.value for kind in Kind if kind.has_microbatch)
_WITHOUT_MICROBATCH = "|".join(
    kind.value for kind in Kind if not kind.has_microbatch and kind is not Kind.OVERLAP_F_B
)
_ACTION = re.compile(rf"({_NUMBER})(?:({_WITH_MICROBATCH})({_NUMBER})|({_WITHOUT_MICROBATCH}))", re.ASCII)


def parse_action(text: str) -> Step:
    """Read the text of one action, all of it, or raise `ActionError` with the position of the fault."""
    if text.startswith("("):
        return _parse_overlap(text)
    return _parse_part(text, text, 0)


def _parse_part(text: str, part: str, offset: int) -> Action:
    """Read `part`, which stands at `offset` in `text`."""
    match = _ACTION.fullmatch(part)
    if match is None or int(match[1]) > MAX_ID or int(match[3] or 0) > MAX_ID:
        raise _fault(text, part, offset)
    if match[4]:
        return Action(Kind(match[4]), int(match[1]))
    return Action(Kind(match[2]), int(match[1]), int(match[3]))


def _parse_overlap(text: str) -> Overlap:
    if "(" in text[1:]:
        raise ActionError(text, text.index("(", 1), "a pair cannot stand within a pair")
    inside, closing, tail = text[1:].partition(")")
    if not closing:
        raise ActionError(text, len(text), "the '(' is never closed")
    if tail != Kind.OVERLAP_F_B.value:
        raise ActionError(text, len(inside) + 2, "a pair in brackets ends in OVERLAP_F_B")
    parts: list[Action] = []
    position = 1
    for part in inside.split(";"):
        parts.append(_parse_part(text, part, position))
        position += len(part) + 1
    if len(parts) != 2:
        raise ActionError(text, 1, f"an overlap has 2 parts, a forward and a backward, not {len(parts)}")
    return Overlap(*parts)


def _fault(text: str, part: str, offset: int) -> ActionError:
    """Say where `part`, which stands at `offset` in `text`, stops being an action, and why."""
    if not part:
        return ActionError(text, offset, "it is empty")
    rest = part.lstrip("0123456789")
    digits = len(part) - len(rest)
    if not digits:
        return ActionError(text, offset, "it does not begin with a stage number, as 2F0 does")
    if reason := _bad_number(part[:digits], "stage"):
        return ActionError(text, offset, reason)
    tokens = [k.value for k in Kind if k is not Kind.OVERLAP_F_B and rest.startswith(k.value)]
    if not tokens:
        known = " ".join(k.value for k in Kind if k is not Kind.OVERLAP_F_B)
        return ActionError(text, offset + digits, f"no kind of action stands here; the kinds are {known}")
    token = max(tokens, key=len)
    after = rest[len(token) :]
    position = offset + digits + len(token)
    if not Kind(token).has_microbatch:
        return ActionError(text, position, f"{token} is about a whole stage: nothing may follow it")
    number = after[: len(after) - len(after.lstrip("0123456789"))]
    if not number:
        return ActionError(text, position, f"{token} needs a microbatch number after it")
    if reason := _bad_number(number, "microbatch"):
        return ActionError(text, position, reason)
    return ActionError(text, position + len(number), "the action ends here, but the text goes on")


def _bad_number(digits: str, name: str) -> str | None:
    if digits[0] == "0" and len(digits) > 1:
        return f"the {name} number has a leading zero"
    if len(digits) > 8 or int(digits) > MAX_ID:
        return f"the {name} number is larger than {MAX_ID}"
    return None


# --- integers --------------------------------------------------------------------------------------

JOINED = 1
KIND_SHIFT, KIND_MASK = 1, 0x1F
MICROBATCH_SHIFT, MICROBATCH_MASK = 6, MAX_ID
STAGE_SHIFT = 32


def code_of(kind: Kind, stage: int, microbatch: int = 0) -> int:
    """The integer form of one part; add to it `microbatch << MICROBATCH_SHIFT` to move along."""
    return stage << STAGE_SHIFT | microbatch << MICROBATCH_SHIFT | kind.number << KIND_SHIFT


def encode(steps: Iterable[Step]) -> Iterator[int]:
    """The parts of `steps` as integers."""
    for step in steps:
        joined = 0
        for part in step.parts:
            yield code_of(part.kind, part.stage, part.microbatch or 0) | joined
            joined = JOINED


def decode(codes: Iterable[int]) -> Iterator[Step]:
    """The steps that `encode` turned into `codes`."""
    pending: Action | None = None
    for code in codes:
        kind = _KINDS[code >> KIND_SHIFT & KIND_MASK]
        microbatch = code >> MICROBATCH_SHIFT & MICROBATCH_MASK if kind.has_microbatch else None
        part = Action(kind, code >> STAGE_SHIFT, microbatch)
        if code & JOINED:
            assert pending is not None
            yield Overlap(pending, part)
            pending = None
            continue
        if pending is not None:
            yield pending
        pending = part
    if pending is not None:
        yield pending
