"""Texts of steps to and from the integer form, without an object for each step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import numpy as np

from penstock.errors import ActionError
from penstock.ir.action import Action, parse_action
from penstock.ir.arrays import Ints, microbatches_in
from penstock.ir.encoding import (
    JOINED,
    KIND_MASK,
    KIND_SHIFT,
    MICROBATCH_MASK,
    MICROBATCH_SHIFT,
    code_of,
    decode,
)
from penstock.ir.graph import StageGraph
from penstock.ir.kinds import Kind

__all__ = ["codes_of_texts", "texts_of_codes"]

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
