"""Groups of options: a command takes a frozen dataclass, and its fields are options of the command line."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from inspect import Parameter
from typing import Any, get_type_hints

__all__ = ["with_groups_expanded"]


def with_groups_expanded(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with the fields of each dataclass among its parameters as keyword arguments of their own."""
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    if not groups:
        return function

    @wraps(function)
    def called(**given: object) -> object:
        for name, group in groups.items():
            given[name] = group(**{each.name: given.pop(each.name) for each in fields(group)})
        return function(**given)

    parameters: list[Parameter] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in groups:
            parameters += _options_of(groups[parameter.name])
        else:
            parameters.append(parameter.replace(annotation=hints[parameter.name]))
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {each.name: each.annotation for each in parameters}
    return called


def _options_of(group: Any) -> Iterator[Parameter]:  # noqa: ANN401 -- a dataclass
    """A keyword argument for each field."""
    hints = get_type_hints(group, include_extras=True)
    for each in fields(group):
        default = Parameter.empty if each.default is MISSING else each.default
        yield Parameter(each.name, Parameter.KEYWORD_ONLY, default=default, annotation=hints[each.name])
