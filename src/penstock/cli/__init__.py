"""The command line: parses argv, prints results. One module per command.

Exit codes: 0 success, 1 invalid schedule or trace, 2 wrong usage.
"""

from __future__ import annotations

import io
import signal
import sys
from typing import Annotated, Any

import typer

from penstock import __version__
from penstock.cli.commands import SUMMARIES, LazyGroup
from penstock.cli.usage_errors import UsageError, error_message, usage_message
from penstock.errors import FormatError, PenstockError, ScheduleError, TraceError

__all__ = ["app", "command", "main"]

app = typer.Typer(
    name="penstock",
    cls=LazyGroup,
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
