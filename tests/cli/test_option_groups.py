"""Tests of groups of options: the fields of a dataclass are options, and the command gets the dataclass."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from penstock.cli import with_groups_expanded


@dataclass(frozen=True)
class Size:
    """A group of two options."""

    width: int
    height: int = 3


def command(name: str, *, size: Size, as_json: bool = False) -> tuple[str, Size, bool]:
    """Draw."""
    return name, size, as_json


def test_the_fields_of_a_group_stand_where_the_group_stood_with_their_types_and_defaults() -> None:
    parameters = inspect.signature(with_groups_expanded(command)).parameters
    assert list(parameters) == ["name", "width", "height", "as_json"]
    assert parameters["width"].default is inspect.Parameter.empty
    assert (parameters["height"].default, parameters["height"].annotation) == (3, int)


def test_the_command_gets_the_group() -> None:
    expanded = with_groups_expanded(command)
    assert expanded(name="a", width=1, height=2, as_json=True) == ("a", Size(1, 2), True)
    assert expanded.__doc__ == "Draw."


def plain(name: str) -> str:
    """No group."""
    return name


def test_a_command_without_groups_stays_as_it_is() -> None:
    assert with_groups_expanded(plain) is plain
