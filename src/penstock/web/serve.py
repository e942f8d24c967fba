"""Starts the server and opens the browser."""

from __future__ import annotations

import socket
import webbrowser
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from penstock.arguments import install_command, printable
from penstock.errors import MissingExtraError, PenstockError


def serve(
    host: str,
    port: int,
    *,
    origins: Sequence[str] = (),
    read_only: bool = False,
    browser: bool = True,
    on_ready: Callable[[str], None] = lambda _: None,
) -> None:
    """Serve the playground until Ctrl-C; `on_ready` is called with its address."""
    try:
        import uvicorn  # noqa: PLC0415 -- an extra

        from penstock.web.access import LOOPBACK, Access  # noqa: PLC0415
        from penstock.web.app import create_app  # noqa: PLC0415
    except ImportError:
        raise MissingExtraError(
            "the playground needs starlette and uvicorn, which are not installed: " + install_command("serve")
        ) from None
    public = frozenset(map(_origin, origins))
    listening = _listen(host, port)
    url = _url(host, listening)
    access = Access(loopback=host in LOOPBACK, origins=public)
    app = create_app(access, read_only=read_only)

    class Server(uvicorn.Server):
        async def startup(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401 -- passed on
            await super().startup(*arguments, **options)
            on_ready(url)
            if browser:
                webbrowser.open(url)

    limits: dict[str, Any] = {"timeout_graceful_shutdown": 1, "h11_max_incomplete_event_size": 65536}
    try:
        Server(uvicorn.Config(app, log_level="warning", **limits)).run([listening])
    except KeyboardInterrupt:
        pass
    finally:
        listening.close()


def _url(host: str, listening: socket.socket) -> str:
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{listening.getsockname()[1]}/"


def _origin(url: str) -> str:
    """The address of a proxy as browsers send it: scheme and host, with the port if it is not the usual one."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.path.strip("/") or parts.query:
        raise PenstockError(
            f"--origin is the address of a proxy, e.g. https://schedules.example.com (given {printable(url)})"
        )
    return f"{parts.scheme}://{parts.netloc}"


def _listen(host: str, port: int) -> socket.socket:
    """A socket on this address; port 0 is any free one."""
    listening: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except (OSError, OverflowError) as error:
        if listening is not None:
            listening.close()
        raise PenstockError(f"cannot listen on --host {host} --port {port}: {error}") from None
    return listening
