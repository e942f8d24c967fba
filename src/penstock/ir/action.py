"""One step of work on one rank: its kind, its stage, its microbatch, and its text.

    2F0                    stage 2, forward, microbatch 0
    1I3  1W3  0B2          input gradient, weight gradient, both in one backward
    3SEND_F1  2RECV_B0     stage 3 sends an activation; stage 2 receives a gradient
    0SEND_F1>2  2RECV_F1<0 the same along an edge that is not of the chain: both ends are named
    3WAIT_SEND_F1          stage 3 waits until that send has ended
    1UNSHARD  0REDUCE_GRAD  0WAIT_REDUCE_GRAD    one stage, no microbatch
    (0F7;7B3)OVERLAP_F_B   a forward and a backward run as one

What a kind is (resource, cost, dependencies, memory) is written once, in `penstock.ir.kinds`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from penstock.arguments import printable, whole_number
from penstock.errors import ActionError
from penstock.ir.kinds import Kind, StageRelation

STAGE_BITS, MICROBATCH_BITS = 16, 20
MAX_STAGE = (1 << STAGE_BITS) - 1
"""The largest stage number."""
MAX_MICROBATCH = (1 << MICROBATCH_BITS) - 1
"""The largest microbatch number."""
_LARGEST = {"stage": MAX_STAGE, "microbatch": MAX_MICROBATCH, "peer": MAX_STAGE}


class WorkUnit(NamedTuple):
    """What one microbatch is at one stage: the key of whatever is held or counted for it."""

    stage: int
    microbatch: int


def chain_neighbour(kind: Kind, stage: int) -> int:
    """The stage at the other end of a message along the chain 0 -> 1 -> 2 -> ..."""
    if kind.spec.other_end is None:
        raise ActionError(f"{stage}{kind}", 0, f"{kind} is not a message: it has no other end")
    return stage + 1 if kind.spec.other_end is StageRelation.OUTPUTS else stage - 1


def _arrow(kind: Kind) -> str:
    """What stands before the stage at the other end: a receive names its source, all else the target."""
    return "<" if kind.is_receive else ">"


@dataclass(frozen=True, slots=True)
class Action:
    """One step of work: `Action(Kind.F, stage=2, microbatch=0)` is `2F0`."""

    kind: Kind
    stage: int
    microbatch: int | None = None
    peer: int | None = None
    """For a message: the stage at the other end, if that is not the next or previous stage of the chain."""

    def __post_init__(self) -> None:
        if self.kind is Kind.OVERLAP_F_B:
            raise ActionError("OVERLAP_F_B", 0, "an overlapped pair is an Overlap(forward, backward)")
        if (self.microbatch is not None) != self.kind.has_microbatch:
            needs = "needs a microbatch" if self.kind.has_microbatch else "has no microbatch"
            raise ActionError(str(self), 0, f"{self.kind} {needs}")
        if self.peer is not None and self.kind.spec.other_end is None:
            raise ActionError(str(self), 0, f"{self.kind} is not a message: it has no other end")
        for name, largest in _LARGEST.items():
            number = getattr(self, name)
            if number is None:
                continue
            whole = number if type(number) is int else whole_number(number)
            if whole is None or not 0 <= whole <= largest:
                reason = f"{name} {printable(repr(number))} is not in 0..{largest}"
                raise ActionError(str(self), 0, reason)
            if whole is not number:
                object.__setattr__(self, name, whole)

        if self.peer is not None and self.peer == chain_neighbour(self.kind, self.stage):
            object.__setattr__(self, "peer", None)

    def __str__(self) -> str:
        microbatch = "" if self.microbatch is None else self.microbatch
        other_end = "" if self.peer is None else f"{_arrow(self.kind)}{self.peer}"
        return f"{self.stage}{self.kind.value}{microbatch}{other_end}"

    @property
    def other_end(self) -> int:
        """For a message: the stage at the other end; `ActionError` for everything else."""
        return chain_neighbour(self.kind, self.stage) if self.peer is None else self.peer

    @property
    def work_unit(self) -> WorkUnit:
        """Its stage and microbatch; microbatch 0 for what has none, as in the integer form."""
        return WorkUnit(self.stage, self.microbatch or 0)

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
_TOKENS = {kind.value: kind for kind in Kind if kind is not Kind.OVERLAP_F_B}
"""The kinds of a single action, by text."""
_WITH_MICROBATCH = "|".join(token for token, kind in _TOKENS.items() if kind.has_microbatch)
_WITHOUT_MICROBATCH = "|".join(token for token, kind in _TOKENS.items() if not kind.has_microbatch)
_ACTION = re.compile(
    rf"({_NUMBER})(?:({_WITH_MICROBATCH})({_NUMBER})(?:([<>])({_NUMBER}))?|({_WITHOUT_MICROBATCH}))", re.ASCII
)


def parse_action(text: str) -> Step:
    """Read the text of one action, all of it, or raise `ActionError` with the position of the error."""
    if text.startswith("("):
        return _parse_overlap(text)
    return _parse_part(text, text, 0)


def _parse_part(text: str, part: str, offset: int) -> Action:
    """Read `part`, which begins at `offset` in `text`."""
    match = _ACTION.fullmatch(part)
    if match is None or any(
        int(match[group] or 0) > largest for group, largest in zip((1, 3, 5), _LARGEST.values())
    ):
        raise _error(text, part, offset)
    if match[6]:
        return Action(Kind(match[6]), int(match[1]))
    kind = Kind(match[2])
    if match[4] is None:
        return Action(kind, int(match[1]), int(match[3]))
    if kind.spec.other_end is None or match[4] != _arrow(kind):
        reason = "a SEND, or its wait, names its target with >, a RECV its source with <, other kinds neither"
        raise ActionError(text, offset + match.start(4), reason)
    return Action(kind, int(match[1]), int(match[3]), int(match[5]))


def _parse_overlap(text: str) -> Overlap:
    if "(" in text[1:]:
        raise ActionError(text, text.index("(", 1), "an overlapped pair cannot contain another pair")
    inside, closing, tail = text[1:].partition(")")
    if not closing:
        raise ActionError(text, len(text), "the '(' is not closed")
    if tail != Kind.OVERLAP_F_B.value:
        raise ActionError(text, len(inside) + 2, "an overlapped pair ends in OVERLAP_F_B")
    parts: list[Action] = []
    position = 1
    for part in inside.split(";"):
        parts.append(_parse_part(text, part, position))
        position += len(part) + 1
    if len(parts) != 2:
        raise ActionError(text, 1, f"an overlap has 2 parts, a forward and a backward, not {len(parts)}")
    return Overlap(*parts)


def _error(text: str, part: str, offset: int) -> ActionError:
    """Where `part`, which begins at `offset` in `text`, is not an action, why, and what it may have meant."""
    if not part:
        return ActionError(text, offset, "the text is empty")
    place, reason = _first_error(part)
    near = _meant(part)
    return ActionError(text, offset + place, f"{reason}; did you mean {near}?" if near else reason)


def _meant(part: str) -> str | None:
    """The action that differs from a text in case, or by a missing stage or underscore: 0f0, F0, 0SENDF1."""
    stage, letters, rest = re.fullmatch(r"(\d*)(\D*)(.*)", part, re.DOTALL).groups()  # type: ignore[union-attr]
    plain = {kind.value.replace("_", ""): kind.value for kind in Kind}
    kind = plain.get(letters.upper().replace("_", "").replace(" ", "").replace("-", ""))
    meant = f"{stage or 0}{kind}{rest}"
    return meant if kind and meant != part and _ACTION.fullmatch(meant) else None


def _first_error(part: str) -> tuple[int, str]:
    """Where a part is not an action, and why."""
    rest = part.lstrip("0123456789")
    digits = len(part) - len(rest)
    if not digits:
        return 0, "it does not begin with a stage number, as 2F0 does"
    if reason := _bad_number(part[:digits], "stage", MAX_STAGE):
        return 0, reason
    token = max(filter(rest.startswith, _TOKENS), key=len, default=None)
    if token is None:
        return digits, f"unknown kind of action; the kinds are {' '.join(_TOKENS)}"
    after = rest[len(token) :]
    position = digits + len(token)
    if not _TOKENS[token].has_microbatch:
        return position, f"{token} has no microbatch: nothing may follow it"
    number = after[: len(after) - len(after.lstrip("0123456789"))]
    if not number:
        return position, f"{token} needs a microbatch number after it"
    if reason := _bad_number(number, "microbatch", MAX_MICROBATCH):
        return position, reason
    after = after[len(number) :]
    if after[:1] in ("<", ">") and (reason := _bad_number(after[1:], "other end's stage", MAX_STAGE)):
        return position + len(number) + 1, reason
    return position + len(number), "unexpected text after the action"


def _bad_number(digits: str, name: str, largest: int) -> str | None:
    if not digits.isdecimal():
        return f"the {name} must be a number"
    if digits[0] == "0" and len(digits) > 1:
        return f"the {name} number has a leading zero"
    if len(digits) > 8 or int(digits) > largest:
        return f"the {name} number is larger than {largest}"
    return None
