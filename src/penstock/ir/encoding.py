"""The integer form of actions: one `int` per part, the fields of many at once, and texts to and from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import compress
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.errors import ActionError
from penstock.ir.action import MICROBATCH_BITS, STAGE_BITS, Action, Overlap, Step, parse_action
from penstock.ir.graph import StageGraph
from penstock.ir.kinds import Kind

# Actions as integers, for hot loops: one `int` per part; an overlapped pair is two parts in a row.
#
#     bit   56 ... 52 51 ... 36 35 ...... 16 15 ... 6 5 ... 1   0
#           port      stage     microbatch   slice    kind      joined: second part of a pair
#     bits  5         16        20           10       5         1
#
# The slice of a microbatch is always 0 so far: its bits are reserved.
# The port distinguishes the messages of a stage that has several edges in one direction: 0 is the neighbour in
# the chain, the others are numbered by the stage graph (`penstock.ir.graph`).


JOINED = 1
KIND_SHIFT, KIND_MASK = 1, 0x1F
SLICE_BITS = 10
MICROBATCH_SHIFT, MICROBATCH_MASK = 6 + SLICE_BITS, (1 << MICROBATCH_BITS) - 1
STAGE_SHIFT, STAGE_MASK = MICROBATCH_SHIFT + MICROBATCH_BITS, (1 << STAGE_BITS) - 1
PORT_SHIFT = STAGE_SHIFT + STAGE_BITS


def code_of(kind: Kind, stage: int, microbatch: int = 0, port: int = 0) -> int:
    """The integer form of one part; add to it `microbatch << MICROBATCH_SHIFT` to move along."""
    here = stage << STAGE_SHIFT | microbatch << MICROBATCH_SHIFT | kind.number << KIND_SHIFT
    return port << PORT_SHIFT | here


def encode(steps: Iterable[Step], graph: StageGraph | None = None) -> Iterator[int]:
    """The parts of `steps` as integers; messages off the chain need the graph."""
    for step in steps:
        joined = 0
        for part in step.parts:
            port = 0 if part.peer is None or graph is None else graph.port(part.kind, part.stage, part.peer)
            yield code_of(part.kind, part.stage, part.microbatch or 0, port) | joined
            joined = JOINED


def decode(codes: Iterable[int], graph: StageGraph | None = None) -> Iterator[Step]:
    """The steps that `encode` turned into `codes`."""
    kinds = tuple(Kind)
    pending: Action | None = None
    for code in codes:
        kind, port = kinds[code >> KIND_SHIFT & KIND_MASK], code >> PORT_SHIFT
        stage = code >> STAGE_SHIFT & STAGE_MASK
        microbatch = code >> MICROBATCH_SHIFT & MICROBATCH_MASK if kind.has_microbatch else None
        peer = graph.peer(kind, stage, port) if port and graph is not None else None
        part = Action(kind, stage, microbatch, peer)
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


# The types of a schedule's arrays, and the fields of many codes at once (`ir.encoding` has those of one).


Ints: TypeAlias = npt.NDArray[np.int64]
SmallInts: TypeAlias = npt.NDArray[np.int8]
Bools: TypeAlias = npt.NDArray[np.bool_]
Floats: TypeAlias = npt.NDArray[np.float64]

# freed at once and never touched: from then on glibc keeps freed blocks of up to this size for the next column,
# instead of returning them to the system and having every page of the next one cleared again
np.empty(30 << 20, dtype=np.uint8)


def codes_of(kind: Kind, stage: Ints | int, microbatch: Ints | int = 0, port: Ints | int = 0) -> Ints:
    """The integer form of many parts of one kind."""
    codes: Ints = np.asarray(stage) << STAGE_SHIFT | microbatch << MICROBATCH_SHIFT | code_of(kind, 0)
    return codes | port << PORT_SHIFT


def kinds_in(codes: Ints) -> Ints:
    """The number of the kind of each part."""
    return _bits(codes, KIND_SHIFT, KIND_MASK)


def stages_in(codes: Ints) -> Ints:
    """The stage of each part."""
    return _bits(codes, STAGE_SHIFT, STAGE_MASK)


def microbatches_in(codes: Ints) -> Ints:
    """The microbatch of each part, 0 where the kind has none."""
    return _bits(codes, MICROBATCH_SHIFT, MICROBATCH_MASK)


def stable_order(numbers: Ints, count: int) -> npt.NDArray[np.intp]:
    """The stable order of numbers below `count`, in linear time if they are few enough."""
    small = np.int16 if count <= np.iinfo(np.int16).max else np.int64
    return np.argsort(numbers.astype(small), kind="stable")


def _bits(codes: Ints, shift: int, mask: int) -> Ints:
    """One of the fields of each part, with one new array: at this size, memory takes most of the time."""
    bits: Ints = codes >> shift
    bits &= mask
    return bits


# Texts of steps to and from the integer form, without an object for each step.


_PAIR = f"){Kind.OVERLAP_F_B.value}"


def texts_of_codes(codes: Ints, graph: StageGraph) -> list[str]:
    """The text of each step: `str` of what `penstock.ir.encoding.decode` returns."""
    microbatch = microbatches_in(codes)
    others, which = np.unique(codes & ~(MICROBATCH_MASK << MICROBATCH_SHIFT | JOINED), return_inverse=True)
    actions = list(decode(others.tolist(), graph))
    before = [f"{part.stage}{part.kind}" for action in actions for part in action.parts]
    numbered = np.array([action.kind.has_microbatch for action in actions], dtype=np.bool_)
    # what follows the microbatch: the other end of a message off the chain
    after = [str(action)[len(head) + 1 :] for action, head in zip(actions, before)]
    numbers = [*map(str, range(int(microbatch.max(initial=0)) + 1)), ""]
    number = np.where(numbered[which], microbatch, -1).tolist()
    texts = [before[i] + numbers[k] + after[i] for i, k in zip(which.tolist(), number)]
    joined = (codes & JOINED).astype(np.bool_)
    for second in np.flatnonzero(joined).tolist():
        texts[second - 1] = f"({texts[second - 1]};{texts[second]}{_PAIR}"
    return list(compress(texts, (~joined).tolist())) if joined.any() else texts


def codes_of_texts(texts: Sequence[str]) -> Ints | None:
    """The integer form of these steps; None if one is no action, or names the other end of a message."""
    reader = _Reader()
    codes: list[int] = []
    try:
        for text in texts:
            if text[:1] == "(":
                codes += reader.pair(text)
            else:
                codes.append(reader.part(text))
    except (ActionError, _NotPlainError):
        return None
    return np.array(codes, dtype=np.int64)


class _NotPlainError(Exception):
    """The code of an action depends on the stage graph."""


class _Reader:
    """Reads actions; each stage and kind, and each microbatch, is parsed at its first occurrence only."""

    def __init__(self) -> None:
        self._heads: dict[str, int] = {}
        self._numbers: dict[str, int] = {}
        self._without_number: dict[str, int] = {}

    def part(self, text: str) -> int:
        """The code of one action."""
        head = text.rstrip("0123456789")
        number = text[len(head) :]
        try:
            return self._heads[head] + self._numbers[number] if number else self._without_number[head]
        except KeyError:
            return self._parsed(text, head, number)

    def _parsed(self, text: str, head: str, number: str) -> int:
        action = parse_action(text)
        if not isinstance(action, Action) or action.peer is not None:
            raise _NotPlainError
        if action.microbatch is None:
            code = self._without_number[head] = code_of(action.kind, action.stage)
            return code
        self._heads[head] = code_of(action.kind, action.stage)
        self._numbers[number] = action.microbatch << MICROBATCH_SHIFT
        return self._heads[head] + self._numbers[number]

    def pair(self, text: str) -> tuple[int, int]:
        """The codes of an overlapped pair."""
        first, separator, second = text[1 : -len(_PAIR)].partition(";")
        if not (text.endswith(_PAIR) and separator):
            raise _NotPlainError
        forward, backward = self.part(first), self.part(second)
        if forward >> KIND_SHIFT & KIND_MASK != Kind.F.number or (
            backward >> KIND_SHIFT & KIND_MASK not in (Kind.B.number, Kind.I.number)
        ):
            raise _NotPlainError
        return forward, backward | JOINED
