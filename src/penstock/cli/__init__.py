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
from penstock.cli.check import check
from penstock.cli.compare import compare
from penstock.cli.demo import demo
from penstock.cli.diagnose import diagnose
from penstock.cli.doctor import doctor
from penstock.cli.estimate import estimate
from penstock.cli.export import export
from penstock.cli.list import list_families
from penstock.cli.option_names import with_options
from penstock.cli.plan import plan
from penstock.cli.play import play
from penstock.cli.read_trace import read_trace
from penstock.cli.search import search
from penstock.cli.show import show
from penstock.cli.simulate import simulate
from penstock.cli.trace import trace
from penstock.cli.verify_grads import verify_grads
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
    help="Pipeline-parallel training schedules: build, validate, simulate, show, search and run them.",
    epilog="Start with: penstock show 1f1b --ranks 4 --microbatches 8",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
app.command("list")(list_families)
app.command("show")(show)
app.command("check")(check)
app.command("simulate")(simulate)
app.command("compare")(compare)
app.command("search")(search)
app.command("estimate")(estimate)
app.command("plan")(plan)
app.command("play")(play)
app.command("trace")(trace)
app.command("read-trace")(read_trace)
app.command("export")(export)
app.command("verify-grads")(verify_grads)
app.command("diagnose")(diagnose)
app.command("demo")(demo)
app.command("doctor")(doctor)


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
        app()
    except (FormatError, ScheduleError, TraceError) as error:
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
