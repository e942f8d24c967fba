"""Splits one value into a part for each microbatch, and checks whether it can be split."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.arguments import some
from penstock.errors import BatchError
from penstock.runtime.execution.splitters import (
    Splitter,
    Value,
    chunk_bounds,
    has_splitter,
    is_split,
    safe_repr,
    splitter_of,
)
from penstock.runtime.pytree import flatten, leaf_paths, unflatten

__all__ = ["size_problems", "split_along", "split_by", "split_problems"]


def split_along(value: Value, dim: int, count: int, name: str) -> list[Value]:
    """The parts of a value whose tensors are split along a dimension; `name` is used in error messages."""
    leaves, structure = flatten(value, has_splitter)
    paths = leaf_paths(structure, name)
    parts = [_split_leaf(leaf, dim, count, path) for leaf, path in zip(leaves, paths)]
    return [unflatten(structure, [of_leaf[k] for of_leaf in parts]) for k in range(count)]


def _split_leaf(leaf: Value, dim: int, count: int, path: str) -> list[Value]:
    if (splitter := splitter_of(leaf)) is not None:
        return split_by(splitter, leaf, count, path)
    if not is_split(leaf):
        return [leaf] * count
    parts = [leaf.narrow(dim, first, size) for first, size in chunk_bounds(leaf.size(dim), count)]
    # views share one version counter for in-place changes; `data` has its own, and no gradient
    return parts if leaf.requires_grad else [part.data for part in parts]


def split_by(splitter: Splitter, value: Value, count: int, name: str) -> list[Value]:
    """The parts that a splitter gives; raises if it gives another number of them."""
    parts = list(splitter.split(value, count))
    if len(parts) != count:
        raise BatchError(
            f"a splitter must return one part for each microbatch, but {safe_repr(splitter)} returned "
            f"{len(parts)} parts of {name} for {count} microbatches"
        )
    return parts


# --- checks ----------------------------------------------------------------------------------------


def split_problems(value: Value, dim: int, count: int, name: str, sizes: dict[str, int]) -> list[str]:
    """Why a value cannot be split; adds the size of each tensor to split, by its path, to `sizes`."""
    problems = []
    leaves, structure = flatten(value, has_splitter)
    for path, leaf in zip(leaf_paths(structure, name), leaves):
        shape = tuple(leaf.shape) if is_split(leaf) else ()
        along = 0 if has_splitter(leaf) else dim
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
    """The problem that tensors differ in their number of rows, if they do; `sizes` has paths and rows."""
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
