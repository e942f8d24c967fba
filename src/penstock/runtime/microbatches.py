"""A batch comes apart into microbatches, and the outputs of the microbatches come together again.

    Batcher(3).arguments((x,), {"mask": m})         x and m have 8 rows

    microbatch 0    rows 0 1 2      (x[0:3],)   {"mask": m[0:3]}
    microbatch 1    rows 3 4 5      (x[3:6],)   {"mask": m[3:6]}
    microbatch 2    rows 6 7        (x[6:8],)   {"mask": m[6:8]}

Parts of tensors are views: nothing is copied, and the gradient of a batch gathers in the batch.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import fields, is_dataclass, replace
from itertools import accumulate
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

from torch import Tensor, cat, stack

from penstock.errors import BatchError
from penstock.given import printable, whole_number

__all__ = ["REPLICATE", "Batcher", "Splitter", "register_splitter"]

Value: TypeAlias = Any
"""Anything that a model takes or gives."""


@runtime_checkable
class Splitter(Protocol):
    """Knows how one value comes apart into `count` parts, and how parts come together."""

    def split(self, value: Value, count: int) -> Sequence[Value]:
        """One part for each of `count` microbatches."""

    def merge(self, parts: Sequence[Value]) -> Value:
        """The whole that these parts, one for each microbatch, make up."""


_Given = TypeVar("_Given")
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
        faults.append(f"a splitter is registered for a type (given {_shown(value_type)})")
    if not _is_splitter(splitter):
        faults.append(f"a splitter is an object with split() and merge() (given {_shown(splitter)})")
    _refuse(faults)
    _REGISTERED[value_type] = splitter


class Batcher:
    """Takes batches apart into `microbatches` parts, and puts outputs together; made once per pipeline.

    `split` says for a positional index, a keyword name or "target" along which dimension its tensors
    are split, or who splits it: a `Splitter`, or `REPLICATE`. Where it says nothing, tensors are split
    along dimension 0, those in tuples, lists, dicts and dataclasses too; tensors without a dimension
    and all other values are handed to every microbatch. A plain list as an argument, keyword or target
    is a ready list of microbatches. `merge` says the same for the outputs.
    """

    def __init__(self, microbatches: int, split: Mapping[int | str, How] | None = None, merge: How = 0) -> None:
        count = whole_number(microbatches)
        faults = []
        if count is None or count < 1:
            faults.append(f"microbatches must be at least 1 (given {_shown(microbatches)})")
        for key, how in (split or {}).items():
            if not isinstance(key, str) and (whole_number(key) is None or key < 0):
                faults.append(f"`split` is by positional index from 0, name or 'target' (given {_shown(key)})")
            faults += _how_faults(how, f"split[{_shown(key)}]")
        _refuse(faults + _how_faults(merge, "`merge`"))
        self._count = int(microbatches)
        self._split = {_plain(key): _plain(how) for key, how in (split or {}).items()}
        self._merge = _plain(merge)

    def arguments(
        self, args: tuple[Value, ...], kwargs: dict[str, Value]
    ) -> tuple[list[tuple[Value, ...]], list[dict[str, Value]]]:
        """The positional and the keyword arguments of each microbatch."""
        given: dict[int | str, Value] = dict(enumerate(args))
        given.update(kwargs)
        parts = self._apart(given, self._unknown_keys(args, kwargs))
        return (
            [tuple([parts[index][k] for index in range(len(args))]) for k in range(self._count)],
            [{name: parts[name][k] for name in kwargs} for k in range(self._count)],
        )

    def target(self, target: Value) -> list[Value]:
        """The target of each microbatch."""
        return self._apart({"target": target}, [])["target"]

    def merged(self, outputs: Sequence[Value]) -> Value:
        """The outputs of all microbatches as the output of the batch."""
        if len(outputs) != self._count:
            raise BatchError(
                f"every microbatch gives one output, but {self._count} microbatches gave {len(outputs)}"
            )
        if isinstance(self._merge, int):
            return _merged(outputs, self._merge, "the output")
        return self._merge.merge(outputs)

    def _unknown_keys(self, args: tuple[Value, ...], kwargs: dict[str, Value]) -> list[str]:
        # a rank that is handed no positional, or no keyword, arguments has nothing to check those keys
        # against: in a pipeline only the first stage sees the whole call
        there = [*range(len(args)), *kwargs]
        unknown = [
            key
            for key in self._split
            if key not in there and key != "target" and (kwargs if isinstance(key, str) else args)
        ]
        names = _some([_name(key) for key in there])
        return [f"split[{_shown(key)}] is for no argument of this call, which has {names}" for key in unknown]

    def _apart(self, given: Mapping[int | str, Value], faults: list[str]) -> dict[int | str, list[Value]]:
        """The parts of every value; all that is wrong with any of them is told before one is split."""
        rows: dict[str, int] = {}
        for key, value in given.items():
            how = self._split.get(key, 0)
            if not isinstance(how, int):
                continue
            if type(value) is list:
                faults += _list_faults(value, self._count, _name(key))
            else:
                faults += _measure(value, how, self._count, _name(key), rows)
        _refuse(faults + _row_faults(rows))
        return {key: self._parts(key, value) for key, value in given.items()}

    def _parts(self, key: int | str, value: Value) -> list[Value]:
        how = self._split.get(key, 0)
        if not isinstance(how, int):
            return _parts_by(how, value, self._count, _name(key))
        return list(value) if type(value) is list else _parts_along(value, how, self._count, _name(key))


# --- what is wrong with what was given -------------------------------------------------------------


def _refuse(faults: Sequence[str]) -> None:
    if faults:
        raise BatchError("\n".join(faults))


def _is_splitter(value: object) -> bool:
    # a class has the two methods too, but nothing to call them on
    return isinstance(value, Splitter) and not isinstance(value, type)


def _plain(given: _Given) -> int | _Given:
    """Whole numbers of any type as `int`, all else as it is."""
    number = whole_number(given)
    return given if number is None else number


def _how_faults(how: object, where: str) -> list[str]:
    if _is_splitter(how) or whole_number(how) is not None:
        return []
    return [f"{where} is a dimension, REPLICATE or an object with split() and merge() (given {_shown(how)})"]


def _list_faults(value: list[Value], count: int, where: str) -> list[str]:
    if len(value) == count:
        return []
    fault = (
        f"a list is a ready list with one entry for each microbatch, but {where} has {len(value)} entries "
        f"for {count} microbatches: to hand a list over as one value, wrap it in a tuple"
    )
    return [fault]


def _measure(value: Value, dim: int, count: int, where: str, rows: dict[str, int]) -> list[str]:
    """What keeps a value from being split; what will be split is put into `rows` with its size."""
    faults = []
    for name, leaf in _leaves(value, where):
        shape = tuple(leaf.shape) if _is_cut(leaf) else ()
        along = 0 if _splitter_of(leaf) is not None else dim
        if not shape:
            continue
        if not -len(shape) <= along < len(shape):
            faults.append(f"{name} cannot be split along dimension {along}: its shape is {shape}")
            continue
        rows[name] = shape[along]
        if shape[along] < count:
            faults.append(
                f"every microbatch needs a row, but {name} of shape {shape} has {shape[along]} along dimension "
                f"{along} for {count} microbatches: use fewer microbatches, another dimension or REPLICATE"
            )
    return faults


def _row_faults(rows: dict[str, int]) -> list[str]:
    names: dict[int, list[str]] = {}
    for name, size in rows.items():
        names.setdefault(size, []).append(name)
    if len(names) <= 1:
        return []
    told = ", ".join(f"{size} in {_some(same)}" for size, same in names.items())
    fault = (
        f"all that is split must have the same number of rows, but there are {told}: say in `split` "
        "which other dimension to take, or REPLICATE for what every microbatch gets whole"
    )
    return [fault]


# --- splitting -------------------------------------------------------------------------------------


def _parts_along(value: Value, dim: int, count: int, where: str) -> list[Value]:
    if (splitter := _splitter_of(value)) is not None:
        return _parts_by(splitter, value, count, where)
    if _is_cut(value):
        return [value.narrow(dim, first, size) for first, size in _bounds(value.size(dim), count)]
    if (children := _children(value)) is None:
        return [value] * count
    split_children = [_parts_along(child, dim, count, where + label) for label, child in children]
    return [_rebuilt(value, [parts[k] for parts in split_children]) for k in range(count)]


def _parts_by(splitter: Splitter, value: Value, count: int, where: str) -> list[Value]:
    parts = list(splitter.split(value, count))
    if len(parts) != count:
        raise BatchError(
            f"a splitter gives one part for each microbatch, but {_shown(splitter)} gave {len(parts)} parts "
            f"of {where} for {count} microbatches"
        )
    return parts


def _bounds(rows: int, count: int) -> list[tuple[int, int]]:
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
        return [self._part(value, first, size) for first, size in _bounds(value.shape[0], count)]

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


# --- merging ---------------------------------------------------------------------------------------


def _merged(parts: Sequence[Value], dim: int, where: str) -> Value:
    first = parts[0]
    structure = _structure(first)
    for k, part in enumerate(parts):
        if _structure(part) != structure:
            raise BatchError(
                f"the outputs of all microbatches must have the same structure, but {where} is {_words(first)} "
                f"in microbatch 0 and {_words(part)} in microbatch {k}: use a Splitter as `merge`"
            )
    if (splitter := _splitter_of(first)) is not None:
        return splitter.merge(parts)
    if isinstance(first, Tensor):
        return _merged_tensors(parts, dim, where)
    if (children := _children(first)) is None:
        return first if all(_equal(first, part) for part in parts) else list(parts)
    across = zip(*(_in_order_of(first, part) for part in parts))
    return _rebuilt(first, [_merged(row, dim, where + label) for (label, _), row in zip(children, across)])


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
    if (splitter := _splitter_of(value)) is not None:
        return id(splitter)
    if isinstance(value, Tensor):
        return Tensor, value.dim()
    children = _children(value)
    if children is None:
        return None
    return type(value), frozenset(value) if isinstance(value, dict) else len(children)


def _in_order_of(first: Value, part: Value) -> list[Value]:
    """The children of `part`, those of a dict in the order of the keys of `first`."""
    if isinstance(part, dict) and not is_dataclass(part):
        return [part[key] for key in first]
    return [child for _, child in _children(part) or ()]


def _words(value: Value) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    kind = printable(type(value).__name__)
    children = _children(value)
    return f"a {kind}" if children is None else f"a {kind} with {_some([label for label, _ in children])}"


def _equal(one: Value, other: Value) -> bool:
    try:
        return one is other or bool(one == other)
    except Exception:  # noqa: BLE001 -- a value may compare in any way it likes
        return False


# --- the walk through a value ----------------------------------------------------------------------


def _splitter_of(value: Value) -> Splitter | None:
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


def _is_cut(value: Value) -> bool:
    """Whether each microbatch gets some rows of this leaf."""
    splitter = _splitter_of(value)
    if splitter is _BLOCK_MASKS:
        return _BLOCK_MASKS.tells_rows_apart(value)
    return splitter is None and isinstance(value, Tensor) and value.dim() > 0


def _leaves(value: Value, where: str) -> Iterator[tuple[str, Value]]:
    children = None if _splitter_of(value) is not None else _children(value)
    if children is None:
        yield where, value
        return
    for label, child in children:
        yield from _leaves(child, where + label)


def _children(value: Value) -> list[tuple[str, Value]] | None:
    """What a tuple, list, dict or dataclass holds, by the way it is written; None for all other values."""
    if isinstance(value, Tensor):
        return None
    # dataclasses first: one that is also a dict keeps its fields and its keys in step by itself
    if is_dataclass(value) and not isinstance(value, type):
        return [(f".{field.name}", getattr(value, field.name)) for field in fields(value)]
    if isinstance(value, dict):
        return [(f"[{key!r}]", child) for key, child in value.items()]
    if isinstance(value, (tuple, list)):
        names = getattr(value, "_fields", None)
        labels = [f".{name}" for name in names] if names else [f"[{place}]" for place in range(len(value))]
        return list(zip(labels, value))
    return None


def _rebuilt(value: Value, children: Sequence[Value]) -> Value:
    """The same kind of tuple, list, dict or dataclass, holding other children."""
    if is_dataclass(value) and not isinstance(value, type):
        by_field = list(zip(fields(value), children))
        rebuilt = replace(value, **{field.name: child for field, child in by_field if field.init})
        for field, child in by_field:
            if not field.init:
                object.__setattr__(rebuilt, field.name, child)
        return rebuilt
    if isinstance(value, dict):
        filled = copy(value)
        for key, child in zip(value, children):
            filled[key] = child
        return filled
    return value._make(children) if hasattr(value, "_make") else type(value)(children)


# --- words -----------------------------------------------------------------------------------------


def _name(key: int | str) -> str:
    if key == "target":
        return "target"
    return f'kwargs["{printable(key)}"]' if isinstance(key, str) else f"args[{key}]"


def _shown(value: object) -> str:
    return printable(repr(value))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
