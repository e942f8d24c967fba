"""The web server: who may ask, the page and a route for every request, and the start of it all."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import webbrowser
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock import __version__
from penstock.arguments import printable
from penstock.errors import Parameter, PenstockError
from penstock.view.html import drawing_script, style_sheet
from penstock.web.answers import REQUESTS, catalogue
from penstock.web.workers import LIMITS, Busy, Limit, Reply, TooLong, WorkerPool

# Access: requests for another host or from another site are refused, and the page loads nothing else.

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


@dataclass(frozen=True)
class Access:
    """The hosts that requests may name, and the origins they may come from.

    Bound to loopback, a request must name loopback: a page of another site whose name is made to resolve to
    127.0.0.1 names its own host. Bound to another address, any host is accepted, but an `Origin` must be the
    same host, or one of `origins`, the public addresses of a proxy.
    """

    loopback: bool = True
    origins: frozenset[str] = field(default_factory=frozenset)

    def problem(self, headers: Headers) -> str | None:
        """Why a request is refused."""
        host = headers.get("host", "")
        name = urlsplit(f"//{host}").hostname or ""
        public = {urlsplit(origin).netloc for origin in self.origins}
        if self.loopback and name not in LOOPBACK and host not in public:
            return f"this server is for {', '.join(sorted(LOOPBACK))} (asked for {host})"
        origin = headers.get("origin")
        if origin is not None and origin not in self.origins and urlsplit(origin).netloc != host:
            return "requests from other sites are refused"
        if (
            headers.get("sec-fetch-site") in ("cross-site", "same-site")
            and headers.get("sec-fetch-mode") != "navigate"
        ):
            return "requests from other sites are refused"
        return None


class AccessMiddleware:
    """Refuses what `Access` refuses, and adds the headers to every answer."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self.app, self.access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        problem = self.access.problem(Headers(scope=scope))
        if problem is None:
            await self.app(scope, receive, send_with_headers)
            return
        body = json.dumps({"error": problem}).encode()
        headers = [(b"content-type", b"application/json")]
        await send_with_headers({"type": "http.response.start", "status": 403, "headers": headers})
        await send({"type": "http.response.body", "body": body})


# The web server: the page, its scripts, and a route for every request of the API.

_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_STATUS = {"result": 200, "error": 422, "memory": 413, "failure": 500}
_UPLOADS = ("csv", "json")


def create_app(
    access: Access | None = None, pool: WorkerPool | None = None, *, read_only: bool = False
) -> Starlette:
    """The application; `read_only` refuses uploads and searches."""
    workers = pool or WorkerPool()

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        workers.start(searches=not read_only)
        yield
        workers.close()

    routes = [Route("/", _file("index.html")), Route("/api/catalogue", _catalogue(read_only=read_only))]
    routes += [Route(f"/page/{name}", _file(name)) for name in page_files() if name != "index.html"]
    routes += [
        Route("/page/timelines.js", _text(f"export {drawing_script()}\n", ".js")),
        Route("/page/timelines.css", _text(style_sheet(), ".css")),
    ]
    routes += [
        Route(f"/api/{name}", _endpoint(name, workers, read_only=read_only), methods=["POST"])
        for name in REQUESTS
        if name != "pareto"
    ]
    routes += [
        Route("/api/pareto", _pareto(workers, read_only=read_only), methods=["POST"]),
        Route("/api/search", _search(workers, read_only=read_only), methods=["POST"]),
    ]
    middleware = [Middleware(AccessMiddleware, access=access or Access())]
    handlers: dict[Any, Any] = {_Refused: _refusal}
    return Starlette(routes=routes, lifespan=lifespan, middleware=middleware, exception_handlers=handlers)


# --- files -----------------------------------------------------------------------------------------


@cache
def page_files() -> tuple[str, ...]:
    """The names of the files of the page; nothing else is served."""
    folder = files("penstock.web").joinpath("page")
    return tuple(sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(tuple(_TYPES))))


def _file(name: str) -> Callable[[Request], Awaitable[Response]]:
    return _text(
        files("penstock.web").joinpath("page", name).read_text(encoding="utf-8"), f".{name.rsplit('.', 1)[1]}"
    )


def _text(text: str, suffix: str) -> Callable[[Request], Awaitable[Response]]:
    async def serve(_: Request) -> Response:
        return Response(text, media_type=_TYPES[suffix], headers={"Cache-Control": "no-cache"})

    return serve


def _catalogue(*, read_only: bool) -> Callable[[Request], Awaitable[Response]]:
    answer = json.dumps(catalogue() | {"version": __version__, "read_only": read_only})

    async def serve(_: Request) -> Response:
        return Response(answer, media_type="application/json")

    return serve


# --- requests --------------------------------------------------------------------------------------


def _error(status: int, message: str) -> Response:
    return Response(json.dumps({"error": message}), status, media_type="application/json")


class _Refused(Exception):  # noqa: N818 -- an answer
    def __init__(self, status: int, message: str) -> None:
        self.response = _error(status, message)


async def _refusal(_: Request, refused: _Refused) -> Response:
    return refused.response


async def _document(request: Request, limit: Limit, *, read_only: bool = False) -> Any:  # noqa: ANN401 -- JSON
    """The body as JSON, if it is not too large, and with `read_only` only if it has no files."""
    if request.headers.get("content-type", "").split(";")[0] != "application/json":
        raise _Refused(415, "send application/json")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit.body:
            raise _Refused(413, f"a request can have at most {limit.body:,} bytes")
    try:
        document = json.loads(bytes(body), parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise _Refused(400, "the request is not valid JSON") from None
    if read_only:
        _check_read_only(document)
    return document


def _no_constant(name: str) -> None:
    raise ValueError(name)


def _check_read_only(document: object) -> None:
    given = document.get("schedules") if isinstance(document, dict) else None
    sources = given if isinstance(given, list) else []
    uploads = isinstance(document, dict) and "files" in document
    if uploads or any(
        isinstance(source, dict) and any(key in source for key in _UPLOADS) for source in sources
    ):
        raise _Refused(403, "this playground is read-only: it takes no files")


def _endpoint(name: str, pool: WorkerPool, *, read_only: bool) -> Callable[[Request], Awaitable[Response]]:
    limit = LIMITS.get(name, Limit())

    async def serve(request: Request) -> Response:
        document = await _document(request, limit, read_only=read_only)
        answering = asyncio.ensure_future(pool.ask(name, document))
        leaving = asyncio.ensure_future(_until_disconnected(request))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                return Response(status_code=499)  # nobody reads it
            return _response(answering.result())
        except TooLong:
            return _error(
                503, f"this takes more than {limit.seconds:g} s here; make it smaller, or use the command line"
            )
        except Busy:
            return _error(503, "too many requests at once; try again")
        finally:
            leaving.cancel()
            answering.cancel()

    return serve


def _response(reply: Reply) -> Response:
    if reply.kind == "result":
        return Response(reply.text, media_type="application/json")
    return _error(_STATUS[reply.kind], _message(reply))


def _message(reply: Reply) -> str:
    if reply.kind == "memory":
        return "this needs more memory than one request may use; make it smaller, or use the command line"
    if reply.kind == "failure":
        sys.stderr.write(reply.text)
        return "an internal error; the server has printed it"
    return reply.text


async def _until_disconnected(request: Request) -> None:
    """Wait until the client is gone; its body has been read."""
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            return


def _pareto(pool: WorkerPool, *, read_only: bool) -> Callable[[Request], Awaitable[Response]]:
    """A stream of lines of JSON: the points so far, and at the end all of them."""

    async def serve(request: Request) -> Response:
        document = await _document(request, LIMITS["pareto"], read_only=read_only)
        return _streamed(_lines(pool, "pareto", document))

    return serve


def _streamed(lines: AsyncIterator[str]) -> Response:
    return StreamingResponse(lines, media_type="application/x-ndjson")


def _search(pool: WorkerPool, *, read_only: bool) -> Callable[[Request], Awaitable[Response]]:
    """A stream of lines of JSON; closing it early, or `{"stop": id}`, ends the search."""
    running: dict[str, asyncio.Event] = {}

    async def serve(request: Request) -> Response:
        if read_only:
            return _error(403, "this playground is read-only: it runs no searches")
        document = await _document(request, LIMITS["search"])
        if isinstance(document, dict) and set(document) == {"stop"}:
            if (stop := running.get(str(document["stop"]))) is not None:
                stop.set()
            return Response("{}", media_type="application/json")
        key = str(document.pop("id", "")) if isinstance(document, dict) else ""
        return _streamed(_lines(pool, "search", document, running, key))

    return serve


def _error_line(message: str) -> str:
    return json.dumps({"error": message}) + "\n"


async def _lines(
    pool: WorkerPool,
    name: str,
    document: object,
    running: dict[str, asyncio.Event] | None = None,
    key: str = "",
) -> AsyncIterator[str]:
    """The replies of a worker; with `running`, setting the event of `key` there stops it."""
    stop: asyncio.Event | None = None
    if running is not None:
        stop = running[key] = asyncio.Event()
    stream = pool.stream(name, document, stop)
    try:
        async for reply in stream:
            if reply.kind in ("result", "progress"):
                yield f'{{"{reply.kind}":{reply.text}}}\n'
            else:
                yield _error_line(_message(reply))
    except TooLong:
        yield _error_line(f"this takes more than {LIMITS[name].seconds:g} s here; make it smaller")
    except Busy:
        yield _error_line("too many requests at once; try again")
    finally:
        if running is not None:
            running.pop(key, None)
        await stream.aclose()  # type: ignore[attr-defined]  # an async generator


# Starts the server and opens the browser.


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
            Parameter("origin"),
            f" is the address of a proxy, e.g. https://schedules.example.com (given {printable(url)})",
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
        where = Parameter("host", host), " ", Parameter("port", port)
        raise PenstockError("cannot listen on ", *where, f": {error}") from None
    return listening
