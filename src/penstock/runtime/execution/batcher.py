"""Splits a batch into microbatches, and merges the outputs of the microbatches.

    Batcher(3).split_arguments((x,), {"mask": m})         x and m have 8 rows

    microbatch 0    rows 0 1 2      (x[0:3],)   {"mask": m[0:3]}
    microbatch 1    rows 3 4 5      (x[3:6],)   {"mask": m[3:6]}
    microbatch 2    rows 6 7        (x[6:8],)   {"mask": m[6:8]}

Parts of tensors are views: nothing is copied, and their gradients accumulate in the gradient of the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from penstock.arguments import printable, some, whole_number
from penstock.errors import BatchError
from penstock.runtime.execution.merging import merge_outputs
from penstock.runtime.execution.splitters import SplitRule, Value, is_splitter, safe_repr
from penstock.runtime.execution.splitting import size_problems, split_along, split_by, split_problems

__all__ = ["Batcher"]

_T = TypeVar("_T")


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
            problems.append(f"microbatches must be at least 1 (given {safe_repr(microbatches)})")
        for key, rule in (split or {}).items():
            if not isinstance(key, str) and (whole_number(key) is None or key < 0):
                problems.append(
                    f"the keys of `split` are positional indices from 0, names or 'target' (given "
                    f"{safe_repr(key)})"
                )
            problems += _rule_problems(rule, f"split[{safe_repr(key)}]")
        _raise_if_any(problems + _rule_problems(merge, "`merge`"))
        self._count = int(microbatches)
        self._split = {_as_int(key): _as_int(rule) for key, rule in (split or {}).items()}
        self._merge = _as_int(merge)

    def split_arguments(
        self, args: tuple[Value, ...], kwargs: dict[str, Value], rows: dict[str, int] | None = None
    ) -> tuple[list[tuple[Value, ...]], list[dict[str, Value]]]:
        """The positional and the keyword arguments of each microbatch.

        `rows` gets the number of rows of each tensor that is split, by its path in the error messages.
        """
        values: dict[int | str, Value] = dict(enumerate(args))
        values.update(kwargs)
        parts = self._split_values(values, self._unknown_keys(args, kwargs), {} if rows is None else rows)
        return (
            [tuple([parts[index][k] for index in range(len(args))]) for k in range(self._count)],
            [{name: parts[name][k] for name in kwargs} for k in range(self._count)],
        )

    def split_target(self, target: Value, rows: dict[str, int] | None = None) -> list[Value]:
        """The target of each microbatch; `rows` has those of arguments, which must be as many, and gets its."""
        return self._split_values({"target": target}, [], {} if rows is None else rows)["target"]

    def merge_outputs(self, outputs: Sequence[Value]) -> Value:
        """The output of the batch."""
        if len(outputs) != self._count:
            raise BatchError(
                f"there must be one output for each microbatch, but {self._count} microbatches gave "
                f"{len(outputs)}"
            )
        if isinstance(self._merge, int):
            return merge_outputs(outputs, self._merge, "the output")
        return self._merge.merge(outputs)

    def _unknown_keys(self, args: tuple[Value, ...], kwargs: dict[str, Value]) -> list[str]:
        # a rank without positional, or without keyword, arguments cannot check those keys: in a pipeline only
        # the first stage gets all arguments
        known = [*range(len(args)), *kwargs]
        unknown = [
            key
            for key in self._split
            if key not in known and key != "target" and (kwargs if isinstance(key, str) else args)
        ]
        names = some([_argument_name(key) for key in known])
        return [
            f"split[{safe_repr(key)}] matches no argument of this call, which has {names}" for key in unknown
        ]

    def _split_values(
        self, values: Mapping[int | str, Value], problems: list[str], rows: dict[str, int]
    ) -> dict[int | str, list[Value]]:
        """The parts of every value; all problems are raised together before anything is split."""
        problems += self._problems(values, rows)
        _raise_if_any(problems + size_problems(rows.items()))
        return {key: self._split_value(key, value) for key, value in values.items()}

    def _problems(self, values: Mapping[int | str, Value], rows: dict[str, int]) -> list[str]:
        """Why values cannot be split; adds the rows of what is split to `rows`."""
        problems: list[str] = []
        for key, value in values.items():
            rule = self._split.get(key, 0)
            if not isinstance(rule, int):
                continue
            if type(value) is list:
                problems += _list_problems(value, self._count, _argument_name(key))
            else:
                problems += split_problems(value, rule, self._count, _argument_name(key), rows)
        return problems

    def _split_value(self, key: int | str, value: Value) -> list[Value]:
        rule = self._split.get(key, 0)
        if not isinstance(rule, int):
            return split_by(rule, value, self._count, _argument_name(key))
        if type(value) is list:
            return list(value)
        return split_along(value, rule, self._count, _argument_name(key))


def _raise_if_any(problems: Sequence[str]) -> None:
    if problems:
        raise BatchError("\n".join(problems))


def _as_int(value: _T) -> int | _T:
    """Integers of any type as `int`, everything else unchanged."""
    number = whole_number(value)
    return value if number is None else number


def _rule_problems(rule: object, name: str) -> list[str]:
    if is_splitter(rule) or whole_number(rule) is not None:
        return []
    return [
        f"{name} must be a dimension, REPLICATE or an object with split() and merge() (given {safe_repr(rule)})"
    ]


def _list_problems(value: list[Value], count: int, name: str) -> list[str]:
    if len(value) == count:
        return []
    problem = (
        f"a list has one entry for each microbatch, but {name} has {len(value)} entries for {count} "
        "microbatches: to pass a list as one value, wrap it in a tuple"
    )
    return [problem]


def _argument_name(key: int | str) -> str:
    if key == "target":
        return "target"
    return f'kwargs["{printable(key)}"]' if isinstance(key, str) else f"args[{key}]"
