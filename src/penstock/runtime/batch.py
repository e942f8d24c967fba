"""The batch of a step: how it is split into microbatches, and how their outputs are merged.

    Batcher(3).split_arguments((x,), {"mask": m})         x and m have 8 rows

    microbatch 0    rows 0 1 2      (x[0:3],)   {"mask": m[0:3]}
    microbatch 1    rows 3 4 5      (x[3:6],)   {"mask": m[3:6]}
    microbatch 2    rows 6 7        (x[6:8],)   {"mask": m[6:8]}

Parts of tensors are views: nothing is copied, and their gradients accumulate in the gradient of the batch.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

from torch import Tensor, cat, stack

from penstock.arguments import printable, some, whole_number
from penstock.errors import BatchError
from penstock.runtime.pytree import Node, child_paths, flatten, leaf_paths, node_of, rebuild, unflatten

Value: TypeAlias = Any
"""Any argument or output of a model."""
_T = TypeVar("_T")


# --- splitters, of one argument or of all values of a type -----------------------------------------


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
        problems.append(f"the first argument must be a type (given {_shown(value_type)})")
    if not _is_splitter(splitter):
        problems.append(f"the splitter must be an object with split() and merge() (given {_shown(splitter)})")
    _raise_if_any(problems)
    _REGISTERED[value_type] = splitter


def _is_splitter(value: object) -> bool:
    # a class has the two methods too, but no object to call them on
    return isinstance(value, Splitter) and not isinstance(value, type)


def _shown(value: object) -> str:
    return printable(repr(value))


def _raise_if_any(problems: Sequence[str]) -> None:
    if problems:
        raise BatchError("\n".join(problems))


def _chunk_bounds(rows: int, count: int) -> list[tuple[int, int]]:
    """Return the first row and the number of rows of each part; the first parts may have one row more."""
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
        return [self._part(value, first, size) for first, size in _chunk_bounds(value.shape[0], count)]

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


def _splitter_of(value: Value) -> Splitter | None:
    """Return the splitter of the value's type, of its nearest base class, or of any type it belongs to."""
    for base in type(value).__mro__:
        if base in _REGISTERED:
            return _REGISTERED[base]
    for value_type, splitter in _REGISTERED.items():
        if isinstance(value, value_type):
            return splitter
    # if the module of block masks is not loaded, the value is none, and the slow import is not needed
    attention = sys.modules.get("torch.nn.attention.flex_attention")
    return _BLOCK_MASKS if attention is not None and isinstance(value, attention.BlockMask) else None


def _has_splitter(value: Value) -> bool:
    return _splitter_of(value) is not None


def _split_shape(leaf: Value) -> tuple[int, ...]:
    """Return the shape of a leaf of which microbatches get rows; empty for one that each gets as a whole."""
    splitter = _splitter_of(leaf)
    if splitter is _BLOCK_MASKS:
        return tuple(leaf.shape) if _BLOCK_MASKS.has_batch_dimension(leaf) else ()
    return tuple(leaf.shape) if splitter is None and isinstance(leaf, Tensor) else ()


# --- splitting one value; `name` is used in error messages -----------------------------------------


def split_along(value: Value, dim: int, count: int, name: str) -> list[Value]:
    """Return the parts of a value whose tensors are split along a dimension."""
    leaves, structure = flatten(value, _has_splitter)
    paths = leaf_paths(structure, name)
    parts = [_split_leaf(leaf, dim, count, path) for leaf, path in zip(leaves, paths)]
    return [unflatten(structure, [of_leaf[k] for of_leaf in parts]) for k in range(count)]


def _split_leaf(leaf: Value, dim: int, count: int, path: str) -> list[Value]:
    if (splitter := _splitter_of(leaf)) is not None:
        return _split_by(splitter, leaf, count, path)
    if not _split_shape(leaf):
        return [leaf] * count
    parts = [leaf.narrow(dim, first, size) for first, size in _chunk_bounds(leaf.size(dim), count)]
    # views share one version counter for in-place changes; `data` has its own, and no gradient
    return parts if leaf.requires_grad else [part.data for part in parts]


def _split_by(splitter: Splitter, value: Value, count: int, name: str) -> list[Value]:
    parts = list(splitter.split(value, count))
    if len(parts) != count:
        raise BatchError(
            f"a splitter must return one part for each microbatch, but {_shown(splitter)} returned "
            f"{len(parts)} parts of {name} for {count} microbatches"
        )
    return parts


def split_problems(value: Value, dim: int, count: int, name: str, sizes: dict[str, int]) -> list[str]:
    """Return why a value cannot be split; add the rows of each tensor to split, by its path, to `sizes`."""
    problems = []
    leaves, structure = flatten(value, _has_splitter)
    for path, leaf in zip(leaf_paths(structure, name), leaves):
        shape, along = _split_shape(leaf), 0 if _has_splitter(leaf) else dim
        if not shape:
            continue
        if not -len(shape) <= along < len(shape):
            problems.append(f"{path} cannot be split along dimension {along}: its shape is {shape}")
            continue
        sizes[path] = shape[along]
        if shape[along] < count:
            problems.append(
                f"every microbatch needs a row, but {path} of shape {shape} has {shape[along]} along dimension "
                f"{along} for {count} microbatches: use fewer microbatches, another dimension or REPLICATE"
            )
    return problems


def size_problems(sizes: Iterable[tuple[str, int]]) -> list[str]:
    """Return the problem that tensors differ in their number of rows, if they do; `sizes` has path and rows."""
    paths: dict[int, list[str]] = {}
    for path, size in sizes:
        paths.setdefault(size, []).append(path)
    if len(paths) <= 1:
        return []
    found = ", ".join(f"{size} in {some(same)}" for size, same in paths.items())
    problem = (
        f"everything that is split must have the same number of rows, but there are {found}: name another "
        "dimension in `split`, or REPLICATE for what every microbatch gets whole"
    )
    return [problem]


# --- merging the outputs of all microbatches -------------------------------------------------------


def _merge(parts: Sequence[Value], dim: int, path: str) -> Value:
    """Return one value in which tensors are concatenated along a dimension; dicts may have any order."""
    first = parts[0]
    for microbatch, part in enumerate(parts):
        if _structure(part) != _structure(first):
            raise BatchError(
                f"the outputs of all microbatches must have the same structure, but {path} is "
                f"{_described(first)} in microbatch 0 and {_described(part)} in microbatch {microbatch}: use a "
                "Splitter as `merge`"
            )
    if (splitter := _splitter_of(first)) is not None:
        return splitter.merge(parts)
    if isinstance(first, Tensor):
        return _merge_tensors(parts, dim, path)
    if (opened := node_of(first)) is None:
        return first if all(_equal(first, part) for part in parts) else list(parts)
    node, children = opened
    columns = zip(*(_children(part, node) for part in parts))
    paths = [path + child for child in child_paths(node, len(children))]
    return rebuild(node, [_merge(column, dim, each) for column, each in zip(columns, paths)])


def _children(value: Value, node: Node) -> Sequence[Value]:
    """Return the children of a container that has the structure of `node`, in the order of its names."""
    if node.kind == "dict":
        return [value[name] for name in node.names]
    opened = node_of(value)
    assert opened is not None, "the structures are equal"
    return opened[1]


def _merge_tensors(tensors: Sequence[Tensor], dim: int, path: str) -> Tensor:
    first = tensors[0]
    if not first.dim():
        return stack(list(tensors))
    if not -first.dim() <= dim < first.dim():
        raise BatchError(f"{path} cannot be merged along dimension {dim}: its shape is {tuple(first.shape)}")
    for microbatch, tensor in enumerate(tensors):
        if tensor.movedim(dim, 0).shape[1:] != first.movedim(dim, 0).shape[1:]:
            raise BatchError(
                f"outputs are merged along dimension {dim} and must agree in all others, but {path} has shape "
                f"{tuple(first.shape)} in microbatch 0 and {tuple(tensor.shape)} in microbatch {microbatch}: "
                "use another dimension or a Splitter as `merge`"
            )
    return cat(list(tensors), dim)


def _structure(value: Value) -> Hashable:
    """Return what must be equal in all microbatches."""
    if (splitter := _splitter_of(value)) is not None:
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


# --- whole batches ---------------------------------------------------------------------------------


class Batcher:
    """Splits batches into `microbatches` parts, and merges outputs; created once per pipeline.

    `split` gives, for a positional index, a keyword name or "target", the dimension along which its tensors are
    split, or what splits it: a `Splitter`, or `REPLICATE`. By default tensors are split along dimension 0, also
    those in tuples, lists, dicts and dataclasses; tensors without a dimension and all other values are given to
    every microbatch. A plain list as an argument, keyword or target is a list of microbatches that are split
    already. `merge` is the same for the outputs.
    """

    def __init__(
        self, microbatches: int, split: Mapping[int | str, SplitRule] | None = None, merge: SplitRule = 0
    ) -> None:
        count = whole_number(microbatches)
        problems = []
        if count is None or count < 1:
            problems.append(f"microbatches must be at least 1 (given {_shown(microbatches)})")
        for key, rule in (split or {}).items():
            if not isinstance(key, str) and (whole_number(key) is None or key < 0):
                problems.append(
                    f"the keys of `split` are positional indices from 0, names or 'target' (given "
                    f"{_shown(key)})"
                )
            problems += _rule_problems(rule, f"split[{_shown(key)}]")
        _raise_if_any(problems + _rule_problems(merge, "`merge`"))
        self._count = int(microbatches)
        self._split = {_as_int(key): _as_int(rule) for key, rule in (split or {}).items()}
        self._merge = _as_int(merge)

    def split_arguments(
        self, args: tuple[Value, ...], kwargs: dict[str, Value], rows: dict[str, int] | None = None
    ) -> tuple[list[tuple[Value, ...]], list[dict[str, Value]]]:
        """Return the positional and the keyword arguments of each microbatch.

        `rows` gets the number of rows of each tensor that is split, by its path in the error messages.
        """
        values: dict[int | str, Value] = dict(enumerate(args))
        values.update(kwargs)
        names = some([_argument_name(key) for key in values])
        # a rank without positional, or without keyword, arguments cannot check those keys: in a pipeline only
        # the first stage gets all arguments
        unknown = [
            f"split[{_shown(key)}] matches no argument of this call, which has {names}"
            for key in self._split
            if key not in values and key != "target" and (kwargs if isinstance(key, str) else args)
        ]
        parts = self._split_values(values, unknown, {} if rows is None else rows)
        return (
            [tuple([parts[index][k] for index in range(len(args))]) for k in range(self._count)],
            [{name: parts[name][k] for name in kwargs} for k in range(self._count)],
        )

    def split_target(self, target: Value, rows: dict[str, int] | None = None) -> list[Value]:
        """Return the target of each microbatch; `rows` has the rows of the arguments, and gets its own."""
        return self._split_values({"target": target}, [], {} if rows is None else rows)["target"]

    def merge_outputs(self, outputs: Sequence[Value]) -> Value:
        """Return the output of the batch."""
        if len(outputs) != self._count:
            raise BatchError(
                f"there must be one output for each microbatch, but {self._count} microbatches gave "
                f"{len(outputs)}"
            )
        if isinstance(self._merge, int):
            return _merge(outputs, self._merge, "the output")
        return self._merge.merge(outputs)

    def _split_values(
        self, values: Mapping[int | str, Value], problems: list[str], rows: dict[str, int]
    ) -> dict[int | str, list[Value]]:
        """Return the parts of every value; raise all problems together before anything is split."""
        for key, value in values.items():
            rule, name = self._split.get(key, 0), _argument_name(key)
            if isinstance(rule, int) and type(value) is not list:
                problems += split_problems(value, rule, self._count, name, rows)
            elif isinstance(rule, int) and len(value) != self._count:
                problems.append(
                    f"a list has one entry for each microbatch, but {name} has {len(value)} entries for "
                    f"{self._count} microbatches: to pass a list as one value, wrap it in a tuple"
                )
        _raise_if_any(problems + size_problems(rows.items()))
        return {key: self._split_value(key, value) for key, value in values.items()}

    def _split_value(self, key: int | str, value: Value) -> list[Value]:
        rule, name = self._split.get(key, 0), _argument_name(key)
        if not isinstance(rule, int):
            return _split_by(rule, value, self._count, name)
        return list(value) if type(value) is list else split_along(value, rule, self._count, name)


def _as_int(value: _T) -> int | _T:
    """Return integers of any type as `int`, everything else unchanged."""
    number = whole_number(value)
    return value if number is None else number


def _rule_problems(rule: object, name: str) -> list[str]:
    if _is_splitter(rule) or whole_number(rule) is not None:
        return []
    needed = "a dimension, REPLICATE or an object with split() and merge()"
    return [f"{name} must be {needed} (given {_shown(rule)})"]


def _argument_name(key: int | str) -> str:
    if key == "target":
        return "target"
    return f'kwargs["{printable(key)}"]' if isinstance(key, str) else f"args[{key}]"
