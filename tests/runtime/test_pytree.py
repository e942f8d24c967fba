"""Promise: a pytree is rebuilt from its leaves as it was, and its paths name the leaves."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from penstock.runtime.pytree import flatten, leaf_paths, unflatten


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Hidden:
    states: Any
    length: int


VALUES: list[tuple[object, list[str]]] = [
    (3, [""]),
    ((), []),
    ((1, [2, {"a": None}]), ["[0]", "[1][0]", "[1][1]['a']"]),
    (Pair(1, "b"), [".left", ".right"]),
    ({"h": Hidden((1, 2), 4)}, ["['h'].states[0]", "['h'].states[1]", "['h'].length"]),
    (OrderedDict(b=1, a=2), ["['b']", "['a']"]),
    (defaultdict(int, x=1), ["['x']"]),
]


@pytest.mark.parametrize(("value", "paths"), VALUES, ids=str)
def test_a_value_is_rebuilt_from_its_leaves_and_each_leaf_has_a_path(value: object, paths: list[str]) -> None:
    leaves, structure = flatten(value)
    assert repr(unflatten(structure, leaves)) == repr(value)
    assert leaf_paths(structure, "") == paths


def test_a_tensor_is_a_leaf() -> None:
    tensor = torch.ones(2)
    assert flatten(tensor) == ([tensor], None)
    assert unflatten(None, [tensor]) is tensor


def test_a_tensor_that_appears_twice_is_one_leaf_and_one_object_again() -> None:
    one, other = torch.ones(2), torch.ones(2)
    leaves, structure = flatten((one, {"a": other, "b": one}))
    assert [id(leaf) for leaf in leaves] == [id(one), id(other)]
    assert leaf_paths(structure, "") == ["[0]", "[1]['a']"]
    first, rest = unflatten(structure, [3, 4])
    assert (first, rest) == (3, {"a": 4, "b": 3})


@pytest.mark.parametrize(("one", "other"), [(1, True), (0, False), (1, 1.0), (0.0, -0.0), ((1,), (True,))])
def test_equal_keys_of_other_types_are_told_apart(one: object, other: object) -> None:
    assert flatten({one: 3})[1] == flatten({one: 3})[1]
    assert flatten({one: 3})[1] != flatten({other: 3})[1]


def test_more_values_can_be_leaves() -> None:
    leaves, structure = flatten((Pair(1, 2), 3), is_leaf=lambda value: isinstance(value, Pair))
    assert leaves == [Pair(1, 2), 3]
    assert leaf_paths(structure, "x") == ["x[0]", "x[1]"]
