"""Wrong usage in one line, with the options that the user typed."""

from __future__ import annotations

import re
from typing import Any

import typer

from penstock.arguments import did_you_mean, printable

# Names of arguments in messages of the library, as the options that the user typed.


_LONG = {"live_limit": "--live", "memory_limit": "--memory", "stages_per_rank": "--stages-per-rank"}
"""Names that only arguments have."""
_SHORT = (
    *("ranks", "microbatches", "moves", "seed", "seconds", "jitter", "quantile", "objective", "placement"),
    *("graph", "group", "step", "replica"),
)
"""Names that are arguments where a message says what they must be."""
_ARGUMENT = re.compile(
    rf"(?<![\w-])({'|'.join(_LONG)}|(?:{'|'.join(_SHORT)})(?= must| is supported|=| of [\w-]+ must)"
    r"|(?<=has no )group)(=)?",
    re.ASCII,
)


def with_options(message: str) -> str:
    """The message with `--live` instead of `live_limit`, `--jitter must` instead of `jitter must`."""

    def option(found: re.Match[str]) -> str:
        return _LONG.get(found[1], f"--{found[1]}") + (" " if found[2] else "")

    return _ARGUMENT.sub(option, message)


# Wrong usage in one line: an unknown option or command, a missing argument, a value of the wrong kind.


UsageError: Any = typer.BadParameter.__base__
"""Click's base class of wrong usage; newer versions of typer have their own copy of click."""

_ONE_OF = re.compile(r"(?:Value error, )?'(.*)' is not one of (.*?)\.?")
_MUST_BE = re.compile(r"Input should be (.*?)(?:, unable to .*)?")


def usage_message(error: Any) -> str:  # noqa: ANN401 -- one of two classes
    """The message, with the option or argument it is about, the given value, and where to read more."""
    if isinstance(error, typer.BadParameter):
        if error.param is None:  # of a command's own checks, complete
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
    """A value that cannot be converted, or is out of range."""
    name = max(error.param.opts, key=len) if error.param.param_type_name == "option" else None
    name = name or error.param.metavar or error.param.name
    details = error.__cause__.errors()[0] if hasattr(error.__cause__, "errors") else {"msg": error.message}
    if found := _ONE_OF.fullmatch(details["msg"]):
        known = found[2].replace("'", "").split(", ")
        given = f"(given {printable(found[1])}){did_you_mean(found[1], known)}"
        return f"{name} is one of {', '.join(known)} {given}"
    if found := _MUST_BE.fullmatch(details["msg"]):
        wanted = found[1].replace("a valid i", "an i").replace("a valid", "a")
        wanted = wanted.replace("greater than or equal to", "at least")
        wanted = wanted.replace("less than or equal to", "at most")
        return f"{name} must be {wanted} (given {printable(str(details['input']))})"
    return str(error.message) if error.message.startswith(name) else f"{name}: {error.message}"
