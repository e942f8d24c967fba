"""The command line: one line of help for each command, whose module is imported when it is called.

Exit codes: 0 success, 1 invalid schedule or trace, 2 wrong usage.
"""

from __future__ import annotations

import inspect
import io
import signal
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from importlib import import_module
from inspect import Parameter
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from penstock import __version__
from penstock.cli.usage_errors import UsageError, error_message, usage_message
from penstock.errors import FormatError, PenstockError, ScheduleError, TraceError

__all__ = ["SUMMARIES", "app", "command", "load_command", "main", "with_groups_expanded"]

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
    single = typer.Typer(add_completion=False)
    text = f"{SUMMARIES[name]}\n\n{inspect.getdoc(function)}"
    single.command(name, cls=_Command, help=text)(with_groups_expanded(function))
    return get_command(single)


class _PlainFlags:
    """In the help, a flag such as `--json` has no type: it takes no value."""

    def get_params(self, ctx: Any) -> list[Any]:  # noqa: ANN401 -- as above
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]  # of typer's class
        for each in parameters:
            if getattr(each, "is_flag", False) and each.metavar is None:
                each.metavar = ""
        return parameters


class _Command(_PlainFlags, TyperCommand):
    pass


class _LazyGroup(_PlainFlags, TyperGroup):
    """The group of all commands, which knows their one-line help and loads the one that is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:  # noqa: ANN401 -- as above
        name, listed, rest = super().resolve_command(ctx, args)
        return name, listed and load_command(str(listed.name)), rest


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
        if parameter.name not in groups:
            parameters.append(parameter.replace(annotation=hints[parameter.name]))
            continue
        options = get_type_hints(groups[parameter.name], include_extras=True)
        for each in fields(groups[parameter.name]):
            default = Parameter.empty if each.default is MISSING else each.default
            name, hint = each.name, options[each.name]
            parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hint))
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {each.name: each.annotation for each in parameters}
    return called


app = typer.Typer(
    name="penstock",
    cls=_LazyGroup,
    help="Pipeline-parallel training schedules: build, validate, simulate, show, search and run them.",
    epilog="Start with: penstock show 1f1b --ranks 4 --microbatches 8",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _not_loaded() -> None:
    """Stands for a command in the list of all, where only its one-line help is needed."""


for _name, _summary in SUMMARIES.items():
    app.command(_name, help=_summary)(_not_loaded)


def _print_version(requested: bool) -> None:  # noqa: FBT001 -- the signature typer calls
    if requested:
        typer.echo(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options before the command."""


def command() -> None:
    """The console script: `main`, ended silently by a closed pipe, e.g. `| head`."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    main()


def main() -> None:
    """Run a command; a user error prints a message, never a traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # "?" for characters that the terminal cannot encode
    try:
        sys.exit(app(standalone_mode=False) or 0)
    except typer.Abort:
        sys.exit(130)  # Ctrl-C
    except (UsageError, PenstockError, OSError, MemoryError) as error:
        message, code = _failure(error)
        if message:
            typer.echo(f"penstock: {message}", err=True)
        sys.exit(code)


def _failure(error: Any) -> tuple[str, int]:  # noqa: ANN401 -- one of several classes
    """Return the message and the exit code; no message where the help is printed already."""
    if isinstance(error, UsageError):
        return "" if type(error).__name__ == "NoArgsIsHelpError" else usage_message(error), 2
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error), 2
    if isinstance(error, MemoryError):
        return "there is not enough memory on this machine: use fewer ranks or microbatches", 2
    of_file = isinstance(error, FormatError | ScheduleError | TraceError)
    of_option = error.parameter and not isinstance(error, FormatError)
    return error_message(error), 1 if of_file and not of_option else 2
