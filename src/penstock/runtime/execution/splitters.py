"""Who knows how a value comes apart: splitters, for one argument or for all values of a type."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol, TypeAlias, runtime_checkable

from torch import Tensor

from penstock.arguments import printable
from penstock.errors import BatchError

__all__ = [
    "REPLICATE",
    "How",
    "Splitter",
    "bounds",
    "is_cut",
    "is_splitter",
    "register_splitter",
    "splitter_of",
]

Value: TypeAlias = Any
"""Anything that a model takes or gives."""


@runtime_checkable
class Splitter(Protocol):
    """Knows how one value comes apart into `count` parts, and how parts come together."""

    def split(self, value: Value, count: int) -> Sequence[Value]:
        """One part for each of `count` microbatches."""

    def merge(self, parts: Sequence[Value]) -> Value:
        """The whole that these parts, one for each microbatch, make up."""


How: TypeAlias = int | Splitter
"""The dimension that tensors are split along, or who splits the value."""


class _Replicate:
    def __repr__(self) -> str:
        return "REPLICATE"

    def split(self, value: Value, count: int) -> Sequence[Value]:
        return [value] * count

    def merge(self, parts: Sequence[Value]) -> Value:
        return parts[0] if all(part is parts[0] for part in parts) else list(parts)


REPLICATE: Splitter = _Replicate()
"""Every microbatch gets the same object."""

_REGISTERED: dict[type, Splitter] = {}


def register_splitter(value_type: type, splitter: Splitter) -> None:
    """Values of this type, wherever they stand in a batch or an output, are left to this splitter."""
    faults = []
    if not isinstance(value_type, type):
        faults.append(f"a splitter is registered for a type (given {shown(value_type)})")
    if not is_splitter(splitter):
        faults.append(f"a splitter is an object with split() and merge() (given {shown(splitter)})")
    if faults:
        raise BatchError("\n".join(faults))
    _REGISTERED[value_type] = splitter


def is_splitter(value: object) -> bool:
    """Whether it can split and merge."""
    # a class has the two methods too, but nothing to call them on
    return isinstance(value, Splitter) and not isinstance(value, type)


def shown(value: object) -> str:
    """As it is written in a message."""
    return printable(repr(value))


def bounds(rows: int, count: int) -> list[tuple[int, int]]:
    """The first row and the number of rows of each part; the first ones are longer if it is uneven."""
    least, longer = divmod(rows, count)
    sizes = [least + (k < longer) for k in range(count)]
    return list(zip(accumulate(sizes, initial=0), sizes))


class _BlockMasks:
    """Block masks of flexible attention: split along the batch, shared where all rows have one mask."""

    @staticmethod
    def tells_rows_apart(mask: Value) -> bool:
        return len(mask.shape) == 4 and mask.shape[0] > 1

    def split(self, value: Value, count: int) -> Sequence[Value]:
        if not self.tells_rows_apart(value):
            return [value] * count
        if value.dq_kv_order is not None:
            raise BatchError(
                "a block mask with a tensor for dq_kv_order cannot be split: "
                "hand over a ready list of masks, one for each microbatch"
            )
        return [self._part(value, first, size) for first, size in bounds(value.shape[0], count)]

    def merge(self, parts: Sequence[Value]) -> Value:
        if any(part is not parts[0] for part in parts):
            raise BatchError(
                "the block masks of different microbatches cannot be merged into one: "
                "leave them out of the output, or use a Splitter as `merge`"
            )
        return parts[0]

    @staticmethod
    def _part(mask: Value, first: int, size: int) -> Value:
        mask_mod = mask.mask_mod

        # a function, not an object that can be called: compilers of attention look into functions
        def of_whole_batch(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            allowed: Tensor = mask_mod(row + first, head, query, key)
            return allowed

        part = mask[first : first + size]
        part.mask_mod = of_whole_batch
        return part


_BLOCK_MASKS = _BlockMasks()


def splitter_of(value: Value) -> Splitter | None:
    """Who splits values of this type: its own splitter, that of its nearest base, or any that fits."""
    for base in type(value).__mro__:
        if base in _REGISTERED:
            return _REGISTERED[base]
    for value_type, splitter in _REGISTERED.items():
        if isinstance(value, value_type):
            return splitter
    # before its module is loaded there can be no block mask, and nobody has to wait for the module
    attention = sys.modules.get("torch.nn.attention.flex_attention")
    return _BLOCK_MASKS if attention is not None and isinstance(value, attention.BlockMask) else None


def is_cut(value: Value) -> bool:
    """Whether each microbatch gets some rows of this leaf."""
    splitter = splitter_of(value)
    if splitter is _BLOCK_MASKS:
        return _BLOCK_MASKS.tells_rows_apart(value)
    return splitter is None and isinstance(value, Tensor) and value.dim() > 0
