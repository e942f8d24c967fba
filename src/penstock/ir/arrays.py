"""The types of a schedule's arrays, and the fields of many codes at once (`ir.encoding` has those of one)."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.ir.encoding import (
    KIND_MASK,
    KIND_SHIFT,
    MICROBATCH_MASK,
    MICROBATCH_SHIFT,
    PORT_SHIFT,
    STAGE_MASK,
    STAGE_SHIFT,
    code_of,
)
from penstock.ir.kinds import Kind

__all__ = [
    "Bools",
    "Floats",
    "Ints",
    "SmallInts",
    "codes_of",
    "kinds_in",
    "microbatches_in",
    "stable_order",
    "stages_in",
]

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
