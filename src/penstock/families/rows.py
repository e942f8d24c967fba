"""Small words to write one rank's list with: passes over microbatches, taking turns, leaving some out."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np

from penstock.ir.action import Kind
from penstock.ir.encoding import JOINED, MICROBATCH_MASK, MICROBATCH_SHIFT, code_of
from penstock.ir.table import Ints

__all__ = ["Row", "delayed_weights", "each", "keep_microbatches", "one_by_one"]


def each(kind: Kind, stage: int, microbatches: Iterable[int]) -> list[int]:
    """This kind of pass over these microbatches of one stage."""
    start = code_of(kind, stage)
    return [start + (k << MICROBATCH_SHIFT) for k in microbatches]


def one_by_one(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """One of the first, one of the second, and so on, as long as both last."""
    return list(chain.from_iterable(zip(first, second)))


def delayed_weights(forwards: list[int], inputs: list[int], weights: list[int], delay: int) -> list[int]:
    """F I, F I, ... and from the `delay`-th I on F I W, F I W, ...; what is left of W comes last."""
    row: list[int] = []
    for j, code in enumerate(inputs):
        row += forwards[j : j + 1]
        row.append(code)
        row += weights[j - delay : j - delay + 1] if j >= delay else ()
    return row + weights[max(len(inputs) - delay, 0) :]


def keep_microbatches(row: Sequence[int], microbatches: int) -> Ints:
    """The row without microbatches from this number on; half of a pair that loses the other stands alone."""
    codes = np.asarray(row, dtype=np.int64)
    keep = ((codes >> MICROBATCH_SHIFT) & MICROBATCH_MASK) < microbatches
    widowed = (codes & JOINED == 1) & ~np.concatenate(([True], keep[:-1]))
    return np.where(widowed, codes - JOINED, codes)[keep]


class Row:
    """One rank's list being written: every word appends the next microbatch of a stage."""

    def __init__(self) -> None:
        self.codes: list[int] = []
        self._forwards: Counter[int] = Counter()
        self._backwards: Counter[int] = Counter()
        self._put_off: dict[int, deque[int]] = defaultdict(deque)

    def F(self, stage: int) -> None:
        """Forward of the next microbatch."""
        self.codes.append(code_of(Kind.F, stage, self._forwards[stage]))
        self._forwards[stage] += 1

    def B(self, stage: int) -> None:
        """Full backward of the next microbatch."""
        self.codes.append(code_of(Kind.B, stage, self._backwards[stage]))
        self._backwards[stage] += 1

    def I(self, stage: int) -> None:
        """Input gradient of the next microbatch; its weight gradient is put off."""
        self.codes.append(code_of(Kind.I, stage, self._backwards[stage]))
        self._put_off[stage].append(self._backwards[stage])
        self._backwards[stage] += 1

    def W(self, stage: int) -> None:
        """The weight gradient put off longest."""
        self.codes.append(code_of(Kind.W, stage, self._put_off[stage].popleft()))

    def F_and_B(self, forward: int, backward: int) -> None:
        """Forward of one stage and full backward of another as one step."""
        self.F(forward)
        self.B(backward)
        self.codes[-1] |= JOINED
