"""Merges the outputs of all microbatches into the output of the batch."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial

from torch import Tensor, cat, stack

from penstock.arguments import printable, some
from penstock.errors import BatchError
from penstock.runtime.execution.splitters import Value, has_splitter, splitter_of
from penstock.runtime.pytree import child_paths, map_together, node_of

__all__ = ["merge_outputs"]


def merge_outputs(outputs: Sequence[Value], dim: int, name: str) -> Value:
    """One value in which tensors are concatenated along a dimension; `name` is used in error messages."""
    return map_together(
        partial(_merged_leaves, dim=dim), outputs, name, is_leaf=has_splitter, check=_check_structure
    )


def _check_structure(parts: Sequence[Value], path: str) -> None:
    first = parts[0]
    structure = _structure(first)
    for microbatch, part in enumerate(parts):
        if _structure(part) != structure:
            raise BatchError(
                f"the outputs of all microbatches must have the same structure, but {path} is "
                f"{_described(first)} in microbatch 0 and {_described(part)} in microbatch {microbatch}: use a "
                "Splitter as `merge`"
            )


def _merged_leaves(leaves: Sequence[Value], path: str, dim: int) -> Value:
    first = leaves[0]
    if (splitter := splitter_of(first)) is not None:
        return splitter.merge(leaves)
    if isinstance(first, Tensor):
        return _merged_tensors(leaves, path, dim)
    return first if all(_equal(first, leaf) for leaf in leaves) else list(leaves)


def _merged_tensors(tensors: Sequence[Tensor], path: str, dim: int) -> Tensor:
    first = tensors[0]
    if not first.dim():
        return stack(list(tensors))
    if not -first.dim() <= dim < first.dim():
        raise BatchError(f"{path} cannot be merged along dimension {dim}: its shape is {tuple(first.shape)}")
    for microbatch, tensor in enumerate(tensors):
        if _without(tensor.shape, dim) != _without(first.shape, dim):
            raise BatchError(
                f"outputs are merged along dimension {dim} and must agree in all others, but {path} has shape "
                f"{tuple(first.shape)} in microbatch 0 and {tuple(tensor.shape)} in microbatch {microbatch}: "
                "use another dimension or a Splitter as `merge`"
            )
    return cat(list(tensors), dim)


def _without(shape: Sequence[int], dim: int) -> list[int]:
    return [size for position, size in enumerate(shape) if position != dim % len(shape)]


def _structure(value: Value) -> Hashable:
    """What must be equal in all microbatches."""
    if (splitter := splitter_of(value)) is not None:
        return id(splitter)
    if isinstance(value, Tensor):
        return Tensor, value.dim()
    if (opened := node_of(value)) is None:
        return None
    node, children = opened
    if node.kind != "dict":
        return type(value), len(children)
    return type(value), frozenset(zip(node.names, node.name_types) if node.name_types else node.names)


def _described(value: Value) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    name = printable(type(value).__name__)
    opened = node_of(value)
    return f"a {name}" if opened is None else f"a {name} with {some(child_paths(opened[0], len(opened[1])))}"


def _equal(one: Value, other: Value) -> bool:
    try:
        return one is other or (type(one) is type(other) and bool(one == other))
    except Exception:  # noqa: BLE001 -- a value may define any comparison
        return False
