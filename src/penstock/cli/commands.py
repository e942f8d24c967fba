"""The commands: one line of help for each; its module is imported when it is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from importlib import import_module
from inspect import Parameter
from typing import Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

# Groups of options: a command takes a frozen dataclass, and its fields are options of the command line.


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


SUMMARIES = {
    "list": "List the schedule families.",
    "show": "Show a schedule: a family built for the given sizes, or a file.",
    "check": "Check a schedule, a file or a family: every rule, and deadlock under every send model.",
    "simulate": (
        "Simulate a schedule: time, bubbles and their causes, peak memory, and the gap to the lower bound."
    ),
    "compare": (
        "Compare schedules: makespan, span, period, bubble, memory, communication, gap to the lower bound."
    ),
    "search": (
        "Search for the best schedule within a memory limit. Ctrl-C stops and keeps the best found so far."
    ),
    "estimate": "Estimate FLOPs, seconds and bytes of a model's layers and stages on a device.",
    "plan": (
        "Plan a run: partition layers into stages, place them, choose microbatches and schedule, rank by time."
    ),
    "play": "Open the playground: a page to build, compare, edit, understand, search and export schedules.",
    "trace": "Simulate a schedule and write the timeline as a trace for Perfetto.",
    "read-trace": (
        "Read the traces of a run: its schedule, its bubbles and their causes, its costs, "
        "and what a search saves."
    ),
    "export": (
        "Export a schedule to torchtitan or Megatron: its files, its flags, or why the trainer cannot run it."
    ),
    "verify-grads": (
        "Verify gradients: train in one process and in pipelines on the CPUs of this machine, and compare."
    ),
    "diagnose": "Find out why a run hangs, from the state files or flight-recorder dumps of its ranks.",
    "demo": "Run an end-to-end demonstration on processes of this machine.",
    "doctor": "Check this machine: Python, torch and its backends, ports, name resolution, clocks, extras.",
}
"""The one-line help of each command, in the order of `penstock --help`."""
_MODULES = dict.fromkeys(("list", "show", "check"), "schedules") | dict.fromkeys(
    ("compare", "trace"), "simulate"
)
"""The module of each command that has none of its own name."""


def load_command(name: str) -> Any:  # noqa: ANN401 -- a class of typer, or of click in older versions of typer
    """Import a command: the function of its name, with the summary ahead of its docstring."""
    stem = name.replace("-", "_")
    module = import_module(f"penstock.cli.{_MODULES.get(name, stem)}")
    function = getattr(module, "list_families" if name == "list" else stem)
    app = typer.Typer(add_completion=False)
    text = f"{SUMMARIES[name]}\n\n{inspect.getdoc(function)}"
    app.command(name, cls=_Command, help=text)(with_groups_expanded(function))
    return get_command(app)


def _with_plain_flags(parameters: list[Any]) -> list[Any]:
    """In the help, a flag such as `--json` has no type: it takes no value."""
    for each in parameters:
        if getattr(each, "is_flag", False) and each.metavar is None:
            each.metavar = ""
    return parameters


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:  # noqa: ANN401 -- as above
        return _with_plain_flags(super().get_params(ctx))


class LazyGroup(TyperGroup):
    """The group of all commands, which knows their one-line help and loads the one that is called."""

    def get_params(self, ctx: Any) -> list[Any]:  # noqa: ANN401 -- as above
        """The options before the command."""
        return _with_plain_flags(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:  # noqa: ANN401 -- as above
        """The command that `args` names, loaded."""
        name, listed, rest = super().resolve_command(ctx, args)
        return name, listed and load_command(str(listed.name)), rest
