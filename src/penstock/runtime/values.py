"""Any value on its way between stages: taken apart into leaves, described by a layout, put together again.

A value is a tree of tuples, lists, dicts, named tuples and dataclasses; its leaves are tensors and everything
else. A layout says the shape of the tree, the shape and type of each tensor, and the other leaves themselves:

    value   (hidden, {"mask": None, "step": 3})
    leaves  [hidden, None, 3]
    layout  structure, [(shape, dtype, requires_grad), None, 3]
    bytes   | prelude | hidden ... |
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from penstock.errors import PipelineError

__all__ = ["PRELUDE", "Layout", "Leaves", "Structure", "describe", "flatten", "unflatten"]

PRELUDE = 64
"""Bytes before the first tensor; the first eight say whether what follows has another layout than expected."""

_ALIGNED = 64

Structure: TypeAlias = Any
"""None for a leaf, else (what it is, the class, its names, the structures inside)."""
Leaves: TypeAlias = list[Any]


def flatten(value: object) -> tuple[Leaves, Structure]:
    """The leaves of a value, from left to right, and how they hang together."""
    if isinstance(value, Tensor):
        return [value], None
    leaves: Leaves = []
    return leaves, _structure(value, leaves)


def _structure(value: Any, leaves: Leaves) -> Structure:
    kind = type(value)
    if kind is tuple or kind is list:
        return kind.__name__, kind, None, tuple(_structure(item, leaves) for item in value)
    if kind is dict:
        return "dict", dict, tuple(value), tuple(_structure(item, leaves) for item in value.values())
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return "named", kind, None, tuple(_structure(item, leaves) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = tuple(field.name for field in dataclasses.fields(value))
        inside = tuple(_structure(getattr(value, name), leaves) for name in names)
        return "dataclass", kind, names, inside
    leaves.append(value)
    return None


def unflatten(structure: Structure, leaves: Sequence[Any]) -> Any:
    """The value that `flatten` took apart."""
    return leaves[0] if structure is None else _built(structure, iter(leaves).__next__)


def _built(structure: Structure, leaf: Callable[[], Any]) -> Any:
    if structure is None:
        return leaf()
    kind, made_of, names, inside = structure
    items = [_built(part, leaf) for part in inside]
    if kind == "list":
        return items
    if kind == "tuple":
        return tuple(items)
    if kind == "dict":
        return dict(zip(names, items))
    if kind == "named":
        return made_of(*items)
    return _dataclass(made_of, dict(zip(names, items)))


def _dataclass(made_of: Any, values: dict[str, object]) -> object:
    """An instance with these fields, also those its __init__ does not take."""
    made = made_of(**{f.name: values[f.name] for f in dataclasses.fields(made_of) if f.init})
    for field in dataclasses.fields(made_of):
        if not field.init:
            object.__setattr__(made, field.name, values[field.name])
    return made


Key: TypeAlias = tuple[Structure, tuple[Any, ...]]


def describe(leaves: Sequence[Any], structure: Structure) -> Key:
    """What a layout is made from; two values with equal keys can use each other's layout."""
    return structure, tuple(
        [
            (leaf.shape, leaf.dtype, leaf.requires_grad)
            if isinstance(leaf, Tensor)
            else ("value", type(leaf), leaf)
            for leaf in leaves
        ]
    )


class Layout:
    """Where each tensor of a value stands in a row of bytes, and what the rest of the value is."""

    def __init__(self, key: Key) -> None:
        self.key = key
        self.structure, entries = key
        self.differentiable: list[bool] = []
        """Per leaf: whether a gradient comes back for it."""
        self._plain: Leaves = []
        self._tensors: list[tuple[int, int, int, torch.dtype, torch.Size]] = []
        end = PRELUDE
        for place, entry in enumerate(entries):
            if entry[0] == "value":
                self._plain.append(entry[2])
                self.differentiable.append(False)
                continue
            shape, dtype, requires_grad = entry
            size = shape.numel() * dtype.itemsize
            self._tensors.append((place, end, end + size, dtype, shape))
            self._plain.append(None)
            self.differentiable.append(requires_grad)
            end += -(-size // _ALIGNED) * _ALIGNED
        self.nbytes = end

    def matches(self, key: Key) -> bool:
        """Whether a value with this key has this layout; what cannot be compared does not match."""
        try:
            return bool(self.key == key)
        except Exception:  # noqa: BLE001 -- a leaf may compare in any way it likes
            return False

    def write(self, buffer: Tensor, leaves: Sequence[Any]) -> None:
        """Copy the tensors into their places; they may be of any strides."""
        for place, start, end, dtype, shape in self._tensors:
            buffer[start:end].view(dtype).view(shape).copy_(leaves[place].detach())

    def read(self, buffer: Tensor) -> Leaves:
        """The leaves; tensors look into the buffer."""
        leaves = list(self._plain)
        for place, start, end, dtype, shape in self._tensors:
            leaves[place] = buffer[start:end].view(dtype).view(shape)
        return leaves

    def dumps(self) -> bytes:
        """To be told to another rank of the same job."""
        try:
            return pickle.dumps(self.key)
        except Exception as error:
            raise PipelineError(
                f"a value that crosses to another rank cannot be pickled ({error}); hand on tensors, numbers, "
                "texts, None, and tuples, lists, dicts and dataclasses of them"
            ) from error

    @classmethod
    def loads(cls, text: bytes) -> Layout:
        """As another rank of the same job told it."""
        return cls(pickle.loads(text))  # noqa: S301 -- from a rank of our own job, never from a file

    def __str__(self) -> str:
        return ", ".join(
            repr(entry[2]) if entry[0] == "value" else f"{_name(entry[1])}{list(entry[0])}"
            for entry in self.key[1]
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def refuse_unsendable(leaves: Sequence[Any], where: str) -> None:
    """Tensors that are not plain rows of numbers cannot be copied into a buffer."""
    for leaf in leaves:
        if isinstance(leaf, Tensor) and (leaf.layout != torch.strided or leaf.is_quantized or leaf.is_nested):
            what = "quantized" if leaf.is_quantized else "nested" if leaf.is_nested else str(leaf.layout)
            raise PipelineError(
                f"{where}: a tensor of layout {what} cannot cross to another rank; "
                "hand on a dense one (`to_dense()`, `dequantize()`, padding)"
            )
