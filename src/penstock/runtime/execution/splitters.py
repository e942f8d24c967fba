"""Splitters: how a value is split into microbatches, for one argument or for all values of a type."""

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
    "SplitRule",
    "Splitter",
    "chunk_bounds",
    "has_splitter",
    "is_split",
    "is_splitter",
    "register_splitter",
    "safe_repr",
    "splitter_of",
]

Value: TypeAlias = Any
"""Any argument or output of a model."""


@runtime_checkable
class Splitter(Protocol):
    """Splits one value into `count` parts, and merges parts into one value."""

    def split(self, value: Value, count: int) -> Sequence[Value]:
        """One part for each of `count` microbatches."""

    def merge(self, parts: Sequence[Value]) -> Value:
        """One value from these parts, one for each microbatch."""


SplitRule: TypeAlias = int | Splitter
"""The dimension along which tensors are split, or the splitter of the value."""


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
    """Use this splitter for all values of this type, anywhere in a batch or an output."""
    problems = []
    if not isinstance(value_type, type):
        problems.append(f"the first argument must be a type (given {safe_repr(value_type)})")
    if not is_splitter(splitter):
        problems.append(
            f"the splitter must be an object with split() and merge() (given {safe_repr(splitter)})"
        )
    if problems:
        raise BatchError("\n".join(problems))
    _REGISTERED[value_type] = splitter


def is_splitter(value: object) -> bool:
    """Whether it is an object with split() and merge()."""
    # a class has the two methods too, but no object to call them on
    return isinstance(value, Splitter) and not isinstance(value, type)


def safe_repr(value: object) -> str:
    """A short printable repr for an error message."""
    return printable(repr(value))


def chunk_bounds(rows: int, count: int) -> list[tuple[int, int]]:
    """The first row and the number of rows of each part; if it is uneven, the first parts have one row more."""
    smallest, larger = divmod(rows, count)
    sizes = [smallest + (k < larger) for k in range(count)]
    return list(zip(accumulate(sizes, initial=0), sizes))


class _BlockMasks:
    """Splits block masks of flex attention along the batch; a mask that all rows share is replicated."""

    @staticmethod
    def has_batch_dimension(mask: Value) -> bool:
        return len(mask.shape) == 4 and mask.shape[0] > 1

    def split(self, value: Value, count: int) -> Sequence[Value]:
        if not self.has_batch_dimension(value):
            return [value] * count
        if value.dq_kv_order is not None:
            raise BatchError(
                "a block mask with a tensor for dq_kv_order cannot be split: "
                "give a list of masks, one for each microbatch"
            )
        return [self._part(value, first, size) for first, size in chunk_bounds(value.shape[0], count)]

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

        # a function, not a callable object: torch.compile can trace it
        def shifted_mask_mod(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            allowed: Tensor = mask_mod(row + first, head, query, key)
            return allowed

        part = mask[first : first + size]
        part.mask_mod = shifted_mask_mod
        return part


_BLOCK_MASKS = _BlockMasks()


def splitter_of(value: Value) -> Splitter | None:
    """The splitter of a value: that of its type, of its nearest base class, or of any type it belongs to."""
    for base in type(value).__mro__:
        if base in _REGISTERED:
            return _REGISTERED[base]
    for value_type, splitter in _REGISTERED.items():
        if isinstance(value, value_type):
            return splitter
    # if the module of block masks is not loaded, the value is none, and the slow import is not needed
    attention = sys.modules.get("torch.nn.attention.flex_attention")
    return _BLOCK_MASKS if attention is not None and isinstance(value, attention.BlockMask) else None


def has_splitter(value: Value) -> bool:
    """Whether a splitter handles this value as a whole."""
    return splitter_of(value) is not None


def is_split(value: Value) -> bool:
    """Whether each microbatch gets some rows of this leaf."""
    splitter = splitter_of(value)
    if splitter is _BLOCK_MASKS:
        return _BLOCK_MASKS.has_batch_dimension(value)
    return splitter is None and isinstance(value, Tensor) and value.dim() > 0
