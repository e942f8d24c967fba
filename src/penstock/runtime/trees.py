"""The trees that values are: tuples, lists, dicts, named tuples and dataclasses, opened and closed again.

Everything else is a leaf. An opened value is a node, which can be told to another rank, and its children.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

__all__ = ["Node", "closed", "labels", "opened"]


class Node(NamedTuple):
    """What a value is besides its children."""

    kind: str
    """`items` and `fields` (a tuple or list without and with names), `dict` or `dataclass`."""
    made_of: Any
    """Its class; of a defaultdict, also what it makes."""
    names: tuple[Any, ...]
    """The names of its children, where they have any."""


def opened(value: Any) -> tuple[Node, list[Any]] | None:
    """The node and the children of a value; None for a leaf."""
    kind = type(value)
    if isinstance(value, Tensor):
        return None
    if isinstance(value, (tuple, list)):
        names = getattr(kind, "_fields", None)
        return Node("items" if names is None else "fields", kind, tuple(names or ())), list(value)
    # dataclasses first: one that is also a dict keeps its fields and its keys in step by itself
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        names += [name for name in getattr(value, "__dict__", ()) if name not in names]
        return Node("dataclass", kind, tuple(names)), [getattr(value, name) for name in names]
    if isinstance(value, dict):
        made_of = (kind, value.default_factory) if isinstance(value, defaultdict) else kind
        return Node("dict", made_of, tuple(value)), list(value.values())
    return None


def closed(node: Node, children: Sequence[Any]) -> Any:
    """A value like the one that was opened, with these children."""
    kind, made_of, names = node
    if kind == "items":
        return children if made_of is list else made_of(children)
    if kind == "fields":
        return made_of(*children)
    pairs = dict(zip(names, children))
    if kind == "dict":
        return made_of[0](made_of[1], pairs) if isinstance(made_of, tuple) else made_of(pairs)
    if issubclass(made_of, dict):  # it has its entries twice, as fields and as items
        return made_of(**pairs)
    made = object.__new__(made_of)  # its __init__ may want other arguments, or change what it gets
    for name, child in pairs.items():
        object.__setattr__(made, name, child)
    return made


def labels(node: Node, count: int) -> list[str]:
    """How each child is written behind the value: `[0]`, `['key']` or `.field`."""
    if node.kind == "items":
        return [f"[{place}]" for place in range(count)]
    return [f"[{name!r}]" if node.kind == "dict" else f".{name}" for name in node.names]
