"""The format of a message between stages: where each tensor of a value is in the bytes, and everything else.

A value is flattened into leaves (see `pytree`). The spec holds the structure, the shape and dtype of each
tensor, and the other leaves themselves:

    value    (hidden, {"mask": None, "step": 3})
    leaves   [hidden, None, 3]
    spec     structure, [(shape, dtype, requires_grad, strides), None, 3]
    bytes    | header | hidden ... |

Of a DTensor, the local shard is sent; the spec holds its sharding.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from penstock.errors import PipelineError
from penstock.runtime.dtensors import Meshes, Sharding, is_dtensor, local, placement_problem, sharding_of
from penstock.runtime.pytree import Leaves, Structure

HEADER_BYTES = 64
"""Bytes before the first tensor; the first eight say whether the message has another spec than expected."""

_ALIGNMENT = 64

SpecKey: TypeAlias = tuple[Structure, tuple[Any, ...]]


def spec_key(leaves: Sequence[Any], structure: Structure) -> SpecKey:
    """What a spec is made from; values with equal keys share a spec."""
    return structure, tuple([_leaf_key(leaf) for leaf in leaves])


_PLAIN = frozenset({type(None), bool, int, str, bytes})


def _leaf_key(leaf: Any) -> tuple[Any, ...]:
    """For a tensor, its metadata; for anything else, a key that is equal only for the same value."""
    if isinstance(leaf, Tensor):
        if type(leaf) is not Tensor and is_dtensor(leaf):
            shard = local(leaf)
            return shard.shape, shard.dtype, leaf.requires_grad, _strides(shard), sharding_of(leaf)
        return leaf.shape, leaf.dtype, leaf.requires_grad, _strides(leaf)
    if type(leaf) in _PLAIN:
        return "value", type(leaf), leaf
    return "pickled", _pickled(leaf, f"a value of type {type(leaf).__name__}")


def _strides(tensor: Tensor) -> tuple[int, ...] | None:
    """The strides to give to its copy; None if the copy is contiguous."""
    return None if tensor.is_contiguous() or not _is_dense(tensor) else tensor.stride()


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill a block of memory without gaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


class _Pickler(pickle.Pickler):
    """Rejects tensors that would lose their gradient or their mesh."""

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, Tensor) and (value.requires_grad or is_dtensor(value)):
            what = "tensor that requires a gradient" if value.requires_grad else "DTensor"
            raise PipelineError(
                f"a {what} is inside of an object that cannot be flattened: return it by itself, or in a "
                "tuple, list, dict or dataclass"
            )
        return NotImplemented


def _dumped(value: object) -> bytes:
    text = io.BytesIO()
    _Pickler(text).dump(value)
    return text.getvalue()


def copied(value: object) -> Any:
    """A copy of an object, as another rank would get it; itself if it cannot be pickled."""
    try:
        return pickle.loads(_dumped(value))  # noqa: S301 -- just written
    except PipelineError:
        raise
    except Exception:  # noqa: BLE001 -- a class may raise anything here
        return value


def _pickled(leaf: object, what: str) -> bytes:
    try:
        return _dumped(leaf)
    except PipelineError:
        raise
    except Exception as error:
        raise PipelineError(
            f"{what} cannot be sent to another rank, because it cannot be pickled ({error}): return tensors, "
            "numbers, strings, None, and tuples, lists, dicts and dataclasses of them, and define classes at "
            "the top level of a module"
        ) from error


_NO_MESHES = Meshes(())


class MessageSpec:
    """The byte range of each tensor of a value, and the rest of the value."""

    def __init__(self, key: SpecKey) -> None:
        self.key = key
        self.structure, entries = key
        self.differentiable: list[bool] = []
        """Per leaf: whether a gradient is sent back for it."""
        self._plain: Leaves = []
        self._objects: list[tuple[int, bytes]] = []
        self._tensors: list[tuple[Any, ...]] = []
        self._shardings: list[tuple[int, Sharding]] = []
        """The positions of DTensors."""
        end = HEADER_BYTES
        for position, entry in enumerate(entries):
            tensor = not isinstance(entry[0], str)
            self._plain.append(entry[2] if entry[0] == "value" else None)
            self.differentiable.append(tensor and entry[2])
            if tensor:
                shape, dtype, _, strides = entry[:4]
                self._shardings += [(position, sharding) for sharding in entry[4:]]
                size = shape.numel() * dtype.itemsize
                self._tensors.append((position, end, end + size, dtype, shape, strides))
                end += -(-size // _ALIGNMENT) * _ALIGNMENT
            elif entry[0] == "pickled":
                self._objects.append((position, entry[1]))
        self.nbytes = end
        single = len(entries) == 1 and not isinstance(entries[0][0], str) and entries[0][3:] == (None,)
        self._single_tensor = entries[0][:3] if single else None

    def matches(self, leaves: Sequence[Any], structure: Structure) -> bool:
        """Whether a value has this spec."""
        if self._single_tensor and len(leaves) == 1:
            leaf = leaves[0]
            if type(leaf) is Tensor and leaf.is_contiguous():  # the output of nearly every stage
                metadata = leaf.shape, leaf.dtype, leaf.requires_grad
                return bool(self._single_tensor == metadata and self.structure == structure)
        return bool(self.key == spec_key(leaves, structure))

    def views(self, storage: Tensor) -> list[Tensor]:
        """The tensors as views of a byte tensor."""
        return [_view(storage[start:end], *metadata) for _, start, end, *metadata in self._tensors]

    def write(self, views: Sequence[Tensor], leaves: Sequence[Any]) -> None:
        """Copy the tensors into their views; they may have any strides."""
        if self._shardings:
            leaves = list(leaves)
            for position, _ in self._shardings:
                leaves[position] = local(leaves[position])
        for view, (position, *_) in zip(views, self._tensors):
            leaf = leaves[position]
            view.copy_(leaf.detach() if leaf.requires_grad else leaf)

    def read(self, views: Sequence[Tensor], meshes: Meshes = _NO_MESHES) -> Leaves:
        """Return the leaves; tensors are views of the bytes, DTensors are on one of these meshes."""
        leaves = list(self._plain)
        for position, text in self._objects:
            leaves[position] = pickle.loads(text)  # noqa: S301 -- from a rank of our own job, never from a file
        for view, (position, *_) in zip(views, self._tensors):
            # unlike detach(), an in-place change of `data` does not bump the version of the other views
            leaves[position] = view.data
        for position, sharding in self._shardings:
            leaves[position] = sharding.build(leaves[position], meshes.matching(sharding.mesh))
        return leaves

    def dumps(self) -> bytes:
        """The spec as bytes, for another rank of the same job."""
        return _pickled(self.key, "a value of a user-defined class")

    @staticmethod
    def loads(text: bytes) -> MessageSpec:
        """The spec that another rank of the same job wrote with `dumps`."""
        return message_spec(pickle.loads(text))  # noqa: S301 -- from a rank of our own job, never from a file


@lru_cache(maxsize=256)
def message_spec(key: SpecKey) -> MessageSpec:
    """The spec of values with this key: the same object each time, so that buffers can cache its views."""
    return MessageSpec(key)


def _view(part: Tensor, dtype: torch.dtype, shape: torch.Size, strides: Any) -> Tensor:
    elements = part.view(dtype)
    return elements.view(shape) if strides is None else elements.as_strided(shape, strides)


def check_sendable(leaves: Sequence[Any], where: str) -> None:
    """Raise for tensors that cannot be copied into a buffer, or would arrive as others."""
    for leaf in leaves:
        problem = ""
        if isinstance(leaf, Tensor) and (leaf.layout != torch.strided or leaf.is_quantized or leaf.is_nested):
            what = "quantized" if leaf.is_quantized else "nested" if leaf.is_nested else str(leaf.layout)
            problem = (
                f"a tensor of layout {what} cannot be sent to another rank: return a dense tensor "
                "(`to_dense()`, `dequantize()`, padding)"
            )
        elif isinstance(leaf, Tensor) and type(leaf).__module__.split(".")[0] != "torch":
            problem = (
                f"a {type(leaf).__name__} would arrive as a plain tensor on the other rank: return "
                "`as_subclass(torch.Tensor)`, and make it again in the next stage"
            )
        elif is_dtensor(leaf) and (placement := placement_problem(leaf)):
            problem = f"{placement}, cannot be sent to another rank: call `redistribute()` on it first"
        if problem:
            raise PipelineError(f"{where}: {problem}")
