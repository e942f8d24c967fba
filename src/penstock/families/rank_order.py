"""Build the order of one rank: codes of one kind, alternating passes, deferred weight gradients, omission.

Codes are the integers of `penstock.ir.encoding.code_of`: one per action.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from penstock.ir.action import Kind
from penstock.ir.encoding import JOINED, MICROBATCH_MASK, MICROBATCH_SHIFT, STAGE_MASK, STAGE_SHIFT, code_of
from penstock.ir.table import Ints

__all__ = [
    "RankOrder",
    "alternate",
    "codes_of",
    "defer_weights",
    "keep_microbatches",
    "keep_stages",
    "overlapped_pairs",
]


def codes_of(kind: Kind, stage: int, microbatches: Iterable[int]) -> list[int]:
    """Return the actions of one kind and one stage for these microbatches."""
    start = code_of(kind, stage)
    return [start + (k << MICROBATCH_SHIFT) for k in microbatches]


def alternate(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """Take one of `first` and one of `second` in turn, until one of them ends."""
    return list(chain.from_iterable(zip(first, second)))


def overlapped_pairs(forwards: Sequence[int], backwards: Sequence[int]) -> list[int]:
    """One overlapped pair after the other, until the forwards or the backwards end."""
    return alternate(forwards, [code | JOINED for code in backwards])


def defer_weights(forwards: list[int], inputs: list[int], weights: list[int], delay: int) -> list[int]:
    """Repeat F I, and F I W from the `delay`-th I on; the remaining W come last."""
    order: list[int] = []
    for j, code in enumerate(inputs):
        order += forwards[j : j + 1]
        order.append(code)
        order += weights[j - delay : j - delay + 1] if j >= delay else ()
    return order + weights[max(len(inputs) - delay, 0) :]


def keep_microbatches(order: Sequence[int], microbatches: int) -> Ints:
    """Drop microbatches from this number on; half of an overlapped pair can remain, as a single step."""
    codes = np.asarray(order, dtype=np.int64)
    return _keep(codes, ((codes >> MICROBATCH_SHIFT) & MICROBATCH_MASK) < microbatches)


def keep_stages(order: Ints, stages: Sequence[int]) -> Ints:
    """Drop all other stages, and number these from 0; half of an overlapped pair can remain."""
    stage = (order >> STAGE_SHIFT) & STAGE_MASK
    number = np.searchsorted(stages, stage)
    keep = np.isin(stage, stages)
    return _keep(order - ((stage - number) << STAGE_SHIFT), keep)


def _keep(codes: Ints, keep: NDArray[np.bool_]) -> Ints:
    """Drop actions; what remains of an overlapped pair is a single step."""
    single = (codes & JOINED == 1) & ~np.concatenate(([True], keep[:-1]))
    return np.where(single, codes - JOINED, codes)[keep]


class RankOrder:
    """The order of one rank under construction: each method appends the next microbatch of a stage."""

    def __init__(self) -> None:
        self.codes: list[int] = []
        self._forwards: Counter[int] = Counter()
        self._backwards: Counter[int] = Counter()
        self._deferred: dict[int, deque[int]] = defaultdict(deque)

    def F(self, stage: int) -> None:
        """Append the forward of the next microbatch."""
        self.codes.append(code_of(Kind.F, stage, self._forwards[stage]))
        self._forwards[stage] += 1

    def B(self, stage: int) -> None:
        """Append the full backward of the next microbatch."""
        self.codes.append(code_of(Kind.B, stage, self._backwards[stage]))
        self._backwards[stage] += 1

    def I(self, stage: int) -> None:
        """Append the input gradient of the next microbatch; its weight gradient is deferred."""
        self.codes.append(code_of(Kind.I, stage, self._backwards[stage]))
        self._deferred[stage].append(self._backwards[stage])
        self._backwards[stage] += 1

    def W(self, stage: int) -> None:
        """Append the weight gradient that was deferred first."""
        self.codes.append(code_of(Kind.W, stage, self._deferred[stage].popleft()))

    def F_and_B(self, forward: int, backward: int) -> None:
        """Append the forward of one stage and the full backward of another as one overlapped step."""
        self.F(forward)
        self.B(backward)
        self.codes[-1] |= JOINED
