"""The command line: parses argv, prints results. One module per command.

Exit codes: 0 success, 1 invalid schedule or trace, 2 wrong usage.
"""

from __future__ import annotations

import io
import signal
import sys
from typing import Annotated, NoReturn

import typer

from penstock import __version__
from penstock.cli.commands import SUMMARIES, LazyGroup
from penstock.cli.option_names import with_options
from penstock.cli.usage_errors import UsageError, usage_message
from penstock.errors import (
    BuildError,
    CostsError,
    FormatError,
    PenstockError,
    PlanError,
    ScheduleError,
    SearchError,
    TraceError,
)

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
    except UsageError as error:
        if type(error).__name__ != "NoArgsIsHelpError":  # the help is printed
            _fail(usage_message(error), 2)
        sys.exit(2)
    except typer.Abort:
        sys.exit(130)  # Ctrl-C
    except (FormatError, ScheduleError, TraceError) as error:
        if error.argument:
            _fail(with_options(str(error)), 2)
        _fail(str(error), 1)
    except (BuildError, CostsError, PlanError, SearchError) as error:  # about arguments, by their Python names
        _fail(with_options(str(error)), 2)
    except PenstockError as error:
        _fail(str(error), 2)
    except OSError as error:
        _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error), 2)


def _fail(message: str, code: int) -> NoReturn:
    typer.echo(f"penstock: {message}", err=True)
    sys.exit(code)
