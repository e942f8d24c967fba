"""Pytrees: nested tuples, lists, dicts, named tuples and dataclasses, flattened into leaves and rebuilt.

Everything else is a leaf:

    value       (hidden, {"mask": None, "step": 3})
    leaves      [hidden, None, 3]
    structure   (node of the tuple, (None, (node of the dict, (None, None))))
    paths       [0]  [1]['mask']  [1]['step']

A tensor that appears several times is one leaf, and the same object again in the rebuilt value.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

Leaves: TypeAlias = list[Any]
Structure: TypeAlias = Any
"""None for a leaf, its position for a tensor that is already a leaf, else its node and the structures of its
children. Structures can be compared and pickled."""
IsLeaf: TypeAlias = Callable[[Any], bool]
_BY_TYPE = (str, int, bool, bytes, type(None))
"""Types of keys that, with the key, tell equal keys apart."""


class Node(NamedTuple):
    """A container without its children."""

    kind: str
    """`items` and `fields` (a tuple or list without and with names), `dict` or `dataclass`."""
    made_of: Any
    """Its class; for a defaultdict, the class and the default factory."""
    names: tuple[Any, ...]
    """The names of its children, if they have names."""
    name_types: tuple[Any, ...] = ()
    """What tells equal keys of a dict apart, such as 1 and True; empty if all of them are strings."""


def node_of(value: Any) -> tuple[Node, list[Any]] | None:
    """Return the node and the children of a container; None for a leaf."""
    kind = type(value)
    if isinstance(value, Tensor):
        return None
    if isinstance(value, (tuple, list)):
        names = getattr(kind, "_fields", None)
        return Node("items" if names is None else "fields", kind, tuple(names or ())), list(value)
    # dataclasses come first: one that is also a dict keeps its fields and its keys equal by itself
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        names += [name for name in getattr(value, "__dict__", ()) if name not in names]
        return Node("dataclass", kind, tuple(names)), [getattr(value, name) for name in names]
    if isinstance(value, dict):
        made_of = (kind, value.default_factory) if isinstance(value, defaultdict) else kind
        names = tuple(value)
        types: tuple[Any, ...] = ()
        if not all(type(name) is str for name in names):
            kinds = list(map(type, names))
            types = tuple([k if k in _BY_TYPE else (k, repr(name)) for k, name in zip(kinds, names)])
        return Node("dict", made_of, names, types), list(value.values())
    return None


def rebuild(node: Node, children: Sequence[Any]) -> Any:
    """Return a container of the node's class with these children."""
    kind, made_of, names, _ = node
    if kind == "items":
        return children if made_of is list else made_of(children)
    if kind == "fields":
        return made_of(*children)
    pairs = dict(zip(names, children))
    if kind == "dict":
        return made_of[0](made_of[1], pairs) if isinstance(made_of, tuple) else made_of(pairs)
    if issubclass(made_of, dict):  # it stores its entries twice, as fields and as items
        return made_of(**pairs)
    made = object.__new__(made_of)  # __init__ may take other arguments, or transform what it gets
    for name, child in pairs.items():
        object.__setattr__(made, name, child)
    return made


def child_paths(node: Node, count: int) -> list[str]:
    """Return the path from the node to each of its `count` children: `[0]`, `['key']` or `.field`."""
    if node.kind == "items":
        return [f"[{position}]" for position in range(count)]
    return [f"[{name!r}]" if node.kind == "dict" else f".{name}" for name in node.names]


def flatten(value: object, is_leaf: IsLeaf | None = None) -> tuple[Leaves, Structure]:
    """Return the leaves of a value, from left to right, and its structure; `is_leaf` marks more leaves."""
    if isinstance(value, Tensor):
        return [value], None
    leaves: Leaves = []
    return leaves, _flatten_into(leaves, {}, value, is_leaf)


def _flatten_into(
    leaves: Leaves, positions: dict[int, int], value: object, is_leaf: IsLeaf | None
) -> Structure:
    """Append the leaves of a value; `positions` has the position of each tensor by its id."""
    if isinstance(value, Tensor):
        if (known := positions.setdefault(id(value), len(leaves))) < len(leaves):
            return known
        leaves.append(value)
        return None
    opened = None if is_leaf is not None and is_leaf(value) else node_of(value)
    if opened is None:
        leaves.append(value)
        return None
    node, children = opened
    return node, tuple([_flatten_into(leaves, positions, child, is_leaf) for child in children])


def unflatten(structure: Structure, leaves: Sequence[Any]) -> Any:
    """Return the value that `flatten` took apart."""
    return leaves[0] if structure is None else _unflatten_from(structure, leaves, iter(leaves).__next__)


def _unflatten_from(structure: Structure, leaves: Sequence[Any], next_leaf: Callable[[], Any]) -> Any:
    if structure is None:
        return next_leaf()
    if isinstance(structure, int):
        return leaves[structure]
    node, inner = structure
    return rebuild(node, [_unflatten_from(part, leaves, next_leaf) for part in inner])


def leaf_paths(structure: Structure, prefix: str) -> list[str]:
    """Return the path of each leaf, in the order of `flatten`."""
    if structure is None:
        return [prefix]
    if isinstance(structure, int):
        return []
    node, inner = structure
    return [
        path
        for child, part in zip(child_paths(node, len(inner)), inner)
        for path in leaf_paths(part, prefix + child)
    ]
