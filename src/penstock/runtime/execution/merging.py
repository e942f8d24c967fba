"""The outputs of all microbatches become the output of the batch."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from torch import Tensor, cat, stack

from penstock.arguments import printable, some
from penstock.errors import BatchError
from penstock.runtime.execution.splitters import Value, splitter_of
from penstock.runtime.trees import Node, closed, labels, opened

__all__ = ["merged"]


def merged(parts: Sequence[Value], dim: int, where: str) -> Value:
    """These parts as one value, tensors joined along a dimension; `where` says what it is."""
    first = parts[0]
    structure = _structure(first)
    for k, part in enumerate(parts):
        if _structure(part) != structure:
            raise BatchError(
                f"the outputs of all microbatches must have the same structure, but {where} is {_words(first)} "
                f"in microbatch 0 and {_words(part)} in microbatch {k}: use a Splitter as `merge`"
            )
    if (splitter := splitter_of(first)) is not None:
        return splitter.merge(parts)
    if isinstance(first, Tensor):
        return _merged_tensors(parts, dim, where)
    if (tree := opened(first)) is None:
        return first if all(_equal(first, part) for part in parts) else list(parts)
    node, children = tree
    across = zip(*(_in_order_of(node, part) for part in parts))
    names = labels(node, len(children))
    return closed(node, [merged(row, dim, where + label) for label, row in zip(names, across)])


def _merged_tensors(parts: Sequence[Tensor], dim: int, where: str) -> Tensor:
    first = parts[0]
    if not first.dim():
        return stack(list(parts))
    if not -first.dim() <= dim < first.dim():
        raise BatchError(f"{where} cannot be merged along dimension {dim}: its shape is {tuple(first.shape)}")
    for k, part in enumerate(parts):
        if _without(part.shape, dim) != _without(first.shape, dim):
            raise BatchError(
                f"outputs are merged along dimension {dim} and agree in all others, but {where} has shape "
                f"{tuple(first.shape)} in microbatch 0 and {tuple(part.shape)} in microbatch {k}: "
                "use another dimension or a Splitter as `merge`"
            )
    return cat(list(parts), dim)


def _without(shape: Sequence[int], dim: int) -> list[int]:
    return [size for place, size in enumerate(shape) if place != dim % len(shape)]


def _structure(value: Value) -> Hashable:
    """What must be the same in all microbatches."""
    if (splitter := splitter_of(value)) is not None:
        return id(splitter)
    if isinstance(value, Tensor):
        return Tensor, value.dim()
    tree = opened(value)
    if tree is None:
        return None
    node, children = tree
    return type(value), frozenset(node.names) if node.kind == "dict" else len(children)


def _in_order_of(first: Node, part: Value) -> list[Value]:
    """The children of `part`, those of a dict in the order of the keys of `first`."""
    tree = opened(part)
    assert tree is not None, "the structures are the same"
    node, children = tree
    if node.kind != "dict":
        return children
    by_name = dict(zip(node.names, children))
    return [by_name[name] for name in first.names]


def _words(value: Value) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    kind = printable(type(value).__name__)
    tree = opened(value)
    return f"a {kind}" if tree is None else f"a {kind} with {some(labels(tree[0], len(tree[1])))}"


def _equal(one: Value, other: Value) -> bool:
    try:
        return one is other or bool(one == other)
    except Exception:  # noqa: BLE001 -- a value may compare in any way it likes
        return False
