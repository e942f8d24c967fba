"""`penstock play`: the playground, a page on which schedules are built, compared, edited and searched."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.arguments import install_command
from penstock.errors import MissingExtraError


def play(
    *,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; loopback unless given.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 is any free one.")] = 0,
    origin: Annotated[
        list[str] | None,
        typer.Option("--origin", metavar="URL", help="Public address of a proxy in front; may be repeated."),
    ] = None,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Refuse uploads and searches, for a shared installation.")
    ] = False,
    no_open: Annotated[bool, typer.Option("--no-open", help="Do not open a browser.")] = False,
) -> None:
    r"""It runs on this machine until Ctrl-C and needs no internet.

    To install it: pip install 'penstock\[serve]'

    Examples:
      penstock play
      penstock play --port 8000 --no-open
      penstock play --host 0.0.0.0 --port 8000 --read-only --no-open --origin https://schedules.example.com
    """
    try:
        from penstock.web.server import serve  # noqa: PLC0415 -- an extra
    except ImportError:
        raise MissingExtraError(
            "the playground needs starlette and uvicorn, which are not installed: " + install_command("serve")
        ) from None

    serve(
        host,
        port,
        origins=origin or (),
        read_only=read_only,
        browser=not no_open,
        on_ready=lambda url: typer.echo(f"playground: {url} (Ctrl-C ends it)"),
    )
