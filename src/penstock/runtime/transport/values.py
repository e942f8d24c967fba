"""Any value on its way between stages: taken apart into leaves, described by a layout, put together again.

A value is a tree of tuples, lists, dicts, named tuples and dataclasses; its leaves are tensors and everything
else. A layout says the shape of the tree, the shape and type of each tensor, and the other leaves themselves:

    value   (hidden, {"mask": None, "step": 3})
    leaves  [hidden, None, 3]
    layout  structure, [(shape, dtype, requires_grad, strides), None, 3]
    bytes   | prelude | hidden ... |

Of a DTensor, this rank's part travels; how it is part of the whole stands in the layout.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from penstock.errors import PipelineError
from penstock.runtime.dtensors import Meshes, Sharding, is_dtensor, local, placement_problem, sharding_of
from penstock.runtime.trees import closed, opened

__all__ = ["PRELUDE", "Layout", "Leaves", "Structure", "describe", "flatten", "layout_of", "unflatten"]

PRELUDE = 64
"""Bytes before the first tensor; the first eight say whether what follows has another layout than expected."""

_ALIGNED = 64

Structure: TypeAlias = Any
"""None for a leaf, else its node and the structures of its children."""
Leaves: TypeAlias = list[Any]


def flatten(value: object) -> tuple[Leaves, Structure]:
    """The leaves of a value, from left to right, and how they hang together."""
    if isinstance(value, Tensor):
        return [value], None
    leaves: Leaves = []
    return leaves, _structure(value, leaves)


def _structure(value: object, leaves: Leaves) -> Structure:
    tree = opened(value)
    if tree is None:
        leaves.append(value)
        return None
    node, children = tree
    return node, tuple([_structure(child, leaves) for child in children])


def unflatten(structure: Structure, leaves: Sequence[Any]) -> Any:
    """The value that `flatten` took apart."""
    return leaves[0] if structure is None else _built(structure, iter(leaves).__next__)


def _built(structure: Structure, leaf: Callable[[], Any]) -> Any:
    if structure is None:
        return leaf()
    node, inside = structure
    return closed(node, [_built(part, leaf) for part in inside])


Key: TypeAlias = tuple[Structure, tuple[Any, ...]]


def describe(leaves: Sequence[Any], structure: Structure) -> Key:
    """What a layout is made from; two values with equal keys can use each other's layout."""
    return structure, tuple([_entry(leaf) for leaf in leaves])


_PLAIN = frozenset({type(None), bool, int, str, bytes})


def _entry(leaf: Any) -> tuple[Any, ...]:
    """Of a tensor, what it looks like; of anything else, what is equal only if the leaf is the same."""
    if isinstance(leaf, Tensor):
        if type(leaf) is not Tensor and is_dtensor(leaf):
            part = local(leaf)
            return part.shape, part.dtype, leaf.requires_grad, _strides(part), sharding_of(leaf)
        return leaf.shape, leaf.dtype, leaf.requires_grad, _strides(leaf)
    if type(leaf) in _PLAIN:
        return "value", type(leaf), leaf
    return "pickled", _pickled(leaf, f"a value of type {type(leaf).__name__}")


def _strides(tensor: Tensor) -> tuple[int, ...] | None:
    """Those that its copy has too, unless they are the usual ones."""
    return None if tensor.is_contiguous() or not _is_dense(tensor) else tensor.stride()


def _is_dense(tensor: Tensor) -> bool:
    """Whether its numbers fill a row of memory without holes, in whatever order."""
    room = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size != 1 and stride != room:
            return False
        room *= size
    return True


class _Pickler(pickle.Pickler):
    """Refuses what would lose its gradient on the way, or its mesh."""

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, Tensor) and (value.requires_grad or is_dtensor(value)):
            what = "tensor that requires a gradient" if value.requires_grad else "DTensor"
            raise PipelineError(
                f"a {what} is inside of an object that cannot be taken apart; hand it on by itself, or in a "
                "tuple, list, dict or dataclass"
            )
        return NotImplemented


def _pickled(leaf: object, what: str) -> bytes:
    text = io.BytesIO()
    try:
        _Pickler(text).dump(leaf)
    except PipelineError:
        raise
    except Exception as error:
        raise PipelineError(
            f"{what} cannot cross to another rank, because it cannot be pickled ({error}); hand on tensors, "
            "numbers, texts, None, and tuples, lists, dicts and dataclasses of them, and define classes at the "
            "top of a module"
        ) from error
    return text.getvalue()


_NO_MESHES = Meshes(())


class Layout:
    """Where each tensor of a value stands in a row of bytes, and what the rest of the value is."""

    def __init__(self, key: Key) -> None:
        self.key = key
        self.structure, entries = key
        self.differentiable: list[bool] = []
        """Per leaf: whether a gradient comes back for it."""
        self._plain: Leaves = []
        self._objects: list[tuple[int, bytes]] = []
        self._tensors: list[tuple[Any, ...]] = []
        self._shardings: list[tuple[int, Sharding]] = []
        """The places of DTensors."""
        end = PRELUDE
        for place, entry in enumerate(entries):
            tensor = not isinstance(entry[0], str)
            self._plain.append(entry[2] if entry[0] == "value" else None)
            self.differentiable.append(tensor and entry[2])
            if tensor:
                shape, dtype, _, strides = entry[:4]
                self._shardings += [(place, sharding) for sharding in entry[4:]]
                size = shape.numel() * dtype.itemsize
                self._tensors.append((place, end, end + size, dtype, shape, strides))
                end += -(-size // _ALIGNED) * _ALIGNED
            elif entry[0] == "pickled":
                self._objects.append((place, entry[1]))
        self.nbytes = end
        lonely = self.structure is None and not isinstance(entries[0][0], str) and entries[0][3:] == (None,)
        self._one_tensor = entries[0][:3] if lonely else None

    def fits(self, leaves: Sequence[Any], structure: Structure) -> bool:
        """Whether a value has this layout."""
        if self._one_tensor and structure is None:
            leaf = leaves[0]
            if type(leaf) is Tensor and leaf.is_contiguous():  # what nearly every stage hands on
                return bool(self._one_tensor == (leaf.shape, leaf.dtype, leaf.requires_grad))
        return bool(self.key == describe(leaves, structure))

    def views(self, row: Tensor) -> list[Tensor]:
        """The tensors in a row of bytes."""
        return [_view(row[start:end], *looks) for _, start, end, *looks in self._tensors]

    def write(self, views: Sequence[Tensor], leaves: Sequence[Any]) -> None:
        """Copy the tensors into their places; they may be of any strides."""
        if self._shardings:
            leaves = list(leaves)
            for place, _ in self._shardings:
                leaves[place] = local(leaves[place])
        for view, (place, *_) in zip(views, self._tensors):
            view.copy_(leaves[place].detach())

    def read(self, views: Sequence[Tensor], meshes: Meshes = _NO_MESHES) -> Leaves:
        """The leaves; tensors look into the row of bytes, DTensors are on one of these meshes."""
        leaves = list(self._plain)
        for place, text in self._objects:
            leaves[place] = pickle.loads(text)  # noqa: S301 -- from a rank of our own job, never from a file
        for view, (place, *_) in zip(views, self._tensors):
            # unlike detach(), it can be changed in place without its neighbours knowing
            leaves[place] = view.data
        for place, sharding in self._shardings:
            leaves[place] = sharding.build(leaves[place], meshes.matching(sharding.mesh))
        return leaves

    def dumps(self) -> bytes:
        """To be told to another rank of the same job."""
        return _pickled(self.key, "a value of a class of its own")

    @staticmethod
    def loads(text: bytes) -> Layout:
        """As another rank of the same job told it."""
        return layout_of(pickle.loads(text))  # noqa: S301 -- from a rank of our own job, never from a file


@lru_cache(maxsize=256)
def layout_of(key: Key) -> Layout:
    """The layout of values with this key: the same one each time, so that buffers know it again."""
    return Layout(key)


def _view(row: Tensor, dtype: torch.dtype, shape: torch.Size, strides: Any) -> Tensor:
    numbers = row.view(dtype)
    return numbers.view(shape) if strides is None else numbers.as_strided(shape, strides)


def refuse_unsendable(leaves: Sequence[Any], where: str) -> None:
    """Tensors that are not plain rows of numbers cannot be copied into a buffer."""
    for leaf in leaves:
        if isinstance(leaf, Tensor) and (leaf.layout != torch.strided or leaf.is_quantized or leaf.is_nested):
            what = "quantized" if leaf.is_quantized else "nested" if leaf.is_nested else str(leaf.layout)
            raise PipelineError(
                f"{where}: a tensor of layout {what} cannot cross to another rank; "
                "hand on a dense one (`to_dense()`, `dequantize()`, padding)"
            )
        if is_dtensor(leaf) and (fault := placement_problem(leaf)):
            raise PipelineError(f"{where}: {fault}, cannot cross to another rank; `redistribute()` it first")
