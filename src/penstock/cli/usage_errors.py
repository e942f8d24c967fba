"""Wrong usage in one line, with the options that the user typed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer

from penstock.arguments import did_you_mean, printable
from penstock.errors import Message, Parameter, PenstockError

_OPTIONS = {
    "batch": "--batch",
    "context": "--cp",
    "context_parallel": "--cp",
    "data_parallel": "--dp",
    "expert": "--ep",
    "expert_parallel": "--ep",
    "families": "--schedules",
    "live_limit": "--live",
    "memory_limit": "--memory",
    "passes": "--lowered",
    "pipeline": "--ranks",
    "samples": "--batch",
    "sequence": "--seq",
    "sequence_parallel": "--sp",
    "tensor": "--tp",
    "tensor_parallel": "--tp",
}
"""The options of parameters whose names differ; the others are `--` and the name with dashes."""


def option_name(parameter: str) -> str:
    """Return the option of a parameter of the library: `--memory` for `memory_limit`."""
    return _OPTIONS.get(parameter, f"--{parameter.replace('_', '-')}")


def _option(parameter: Parameter) -> str:
    """Return a parameter as it is typed, with its value if it has one."""
    name, value = option_name(parameter.name), parameter.value
    if value is None or value is True:
        return name
    typed = ",".join(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else value
    return f"{name} {typed}"


def with_options(message: Message) -> str:
    """Return the text of a message with options instead of parameters."""
    return message.text(_option)


def error_message(error: PenstockError) -> str:
    """Return the message with options instead of parameters, and first the one that it is about."""
    text = with_options(error.message)
    return text if error.message.parameter or not error.parameter else f"{option_name(error.parameter)}: {text}"


# Wrong usage that typer finds: an unknown option or command, a missing argument, a value of the wrong kind.


UsageError: Any = typer.BadParameter.__base__
"""Click's base class of wrong usage; newer versions of typer have their own copy of click."""

_KINDS = {"int_parsing": "an integer", "int_from_float": "an integer", "float_parsing": "a number"}
"""What pydantic's kinds of errors want."""


class ValueNameError(typer.BadParameter):
    """A value that is none of the known names; the message names the option, or the argument."""

    def __init__(self, name: str, known: Sequence[str], given: str) -> None:
        near = did_you_mean(given, known)
        super().__init__(f"{name} is one of {', '.join(known)} (given {printable(given)}){near}")


def usage_message(error: Any) -> str:  # noqa: ANN401 -- one of two classes
    """Return the message, with the option or argument it is about, the given value, and where to read more."""
    if isinstance(error, typer.BadParameter):
        if error.param is None or isinstance(error, ValueNameError):  # of a command's own checks, complete
            return str(error.message)
        if error.message:
            return _value_message(error)
    message = " ".join(str(error.format_message()).split())
    message = message.replace(". Did", "; did").replace(". Choose", "; choose").rstrip(".")
    if (name := getattr(error, "option_name", None)) and hasattr(error, "possibilities"):
        options = [each for param in error.ctx.command.params for each in param.opts if each.startswith("--")]
        message = f"no such option: {printable(name)}{did_you_mean(name, options, 0.6)}"
    path = error.ctx.command_path if error.ctx else "penstock"
    return f"{message[:1].lower()}{message[1:]} (see {path} --help)"


def _value_message(error: Any) -> str:  # noqa: ANN401 -- as above
    """Return the message about a value that cannot be converted, or is out of range."""
    name = max(error.param.opts, key=len) if error.param.param_type_name == "option" else None
    name = name or error.param.metavar or error.param.name
    details: Any = (
        error.__cause__.errors()[0] if hasattr(error.__cause__, "errors") else {"type": "", "input": ""}
    )
    given = printable(str(details["input"]))
    limits = details.get("ctx", {})
    wanted = _KINDS.get(details["type"], "")
    wanted = f"at least {limits['ge']}" if "ge" in limits else wanted
    wanted = f"at most {limits['le']}" if "le" in limits else wanted
    if wanted:
        return f"{name} must be {wanted} (given {given})"
    return str(error.message) if error.message.startswith(name) else f"{name}: {error.message}"
