"""A batch comes apart into microbatches, and the outputs of the microbatches come together again.

    Batcher(3).arguments((x,), {"mask": m})         x and m have 8 rows

    microbatch 0    rows 0 1 2      (x[0:3],)   {"mask": m[0:3]}
    microbatch 1    rows 3 4 5      (x[3:6],)   {"mask": m[3:6]}
    microbatch 2    rows 6 7        (x[6:8],)   {"mask": m[6:8]}

Parts of tensors are views: nothing is copied, and the gradient of a batch gathers in the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from penstock.arguments import printable, some, whole_number
from penstock.errors import BatchError
from penstock.runtime.execution.merging import merged
from penstock.runtime.execution.splitters import (
    How,
    Splitter,
    Value,
    bounds,
    is_cut,
    is_splitter,
    shown,
    splitter_of,
)
from penstock.runtime.trees import closed, labels, opened

__all__ = ["Batcher"]

_Given = TypeVar("_Given")


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
            faults.append(f"microbatches must be at least 1 (given {shown(microbatches)})")
        for key, how in (split or {}).items():
            if not isinstance(key, str) and (whole_number(key) is None or key < 0):
                faults.append(f"`split` is by positional index from 0, name or 'target' (given {shown(key)})")
            faults += _how_faults(how, f"split[{shown(key)}]")
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
            return merged(outputs, self._merge, "the output")
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
        names = some([_name(key) for key in there])
        return [f"split[{shown(key)}] is for no argument of this call, which has {names}" for key in unknown]

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


def _plain(given: _Given) -> int | _Given:
    """Whole numbers of any type as `int`, all else as it is."""
    number = whole_number(given)
    return given if number is None else number


def _how_faults(how: object, where: str) -> list[str]:
    if is_splitter(how) or whole_number(how) is not None:
        return []
    return [f"{where} is a dimension, REPLICATE or an object with split() and merge() (given {shown(how)})"]


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
        shape = tuple(leaf.shape) if is_cut(leaf) else ()
        along = 0 if splitter_of(leaf) is not None else dim
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
    told = ", ".join(f"{size} in {some(same)}" for size, same in names.items())
    fault = (
        f"all that is split must have the same number of rows, but there are {told}: say in `split` "
        "which other dimension to take, or REPLICATE for what every microbatch gets whole"
    )
    return [fault]


# --- splitting -------------------------------------------------------------------------------------


def _parts_along(value: Value, dim: int, count: int, where: str) -> list[Value]:
    if (splitter := splitter_of(value)) is not None:
        return _parts_by(splitter, value, count, where)
    if is_cut(value):
        parts = [value.narrow(dim, first, size) for first, size in bounds(value.size(dim), count)]
        # views share a count of their changes in place; `data` has one of its own, and no gradient
        return parts if value.requires_grad else [part.data for part in parts]
    if (tree := opened(value)) is None:
        return [value] * count
    node, children = tree
    names = labels(node, len(children))
    apart = [_parts_along(child, dim, count, where + label) for label, child in zip(names, children)]
    return [closed(node, [parts[k] for parts in apart]) for k in range(count)]


def _parts_by(splitter: Splitter, value: Value, count: int, where: str) -> list[Value]:
    parts = list(splitter.split(value, count))
    if len(parts) != count:
        raise BatchError(
            f"a splitter gives one part for each microbatch, but {shown(splitter)} gave {len(parts)} parts "
            f"of {where} for {count} microbatches"
        )
    return parts


def _leaves(value: Value, where: str) -> Iterator[tuple[str, Value]]:
    """The leaves and how each is written."""
    tree = None if splitter_of(value) is not None else opened(value)
    if tree is None:
        yield where, value
        return
    node, children = tree
    for label, child in zip(labels(node, len(children)), children):
        yield from _leaves(child, where + label)


# --- words -----------------------------------------------------------------------------------------


def _name(key: int | str) -> str:
    if key == "target":
        return "target"
    return f'kwargs["{printable(key)}"]' if isinstance(key, str) else f"args[{key}]"
