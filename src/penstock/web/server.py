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
from functools import partial
from importlib.resources import files
from pathlib import Path
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
from penstock.web.workers import LIMITS, Limit, Reply, WorkerPool

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
        public = {urlsplit(origin).netloc for origin in self.origins}
        if self.loopback and urlsplit(f"//{host}").hostname not in LOOPBACK and host not in public:
            return f"this server is for {', '.join(sorted(LOOPBACK))} (asked for {host})"
        origin, fetched = headers.get("origin"), headers.get("sec-fetch-site") in ("cross-site", "same-site")
        other = origin is not None and origin not in self.origins and urlsplit(origin).netloc != host
        if other or (fetched and headers.get("sec-fetch-mode") != "navigate"):
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
        answer = self.app if problem is None else _error(403, problem)
        await answer(scope, receive, send_with_headers)


_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_JSON = "application/json"
_STATUS = {"error": 422, "memory": 413, "failure": 500, "late": 503, "busy": 503}
_UPLOADS = ("csv", "json")
_STREAMED = ("pareto", "search")


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

    known = json.dumps(catalogue() | {"version": __version__, "read_only": read_only})
    folder = files("penstock.web").joinpath("page")
    served = (entry for entry in folder.iterdir() if entry.name.endswith(tuple(_TYPES)))
    page = {entry.name: entry.read_text(encoding="utf-8") for entry in served}
    page |= {"timelines.js": f"export {drawing_script()}\n", "timelines.css": style_sheet()}
    routes = [Route("/", _static(page.pop("index.html"), ".html")), Route("/api/catalogue", _static(known, ""))]
    routes += [Route(f"/page/{name}", _static(text, Path(name).suffix)) for name, text in page.items()]
    api = _Api(workers, read_only)
    for name in {*REQUESTS, *_STREAMED}:
        endpoint = partial(api.stream if name in _STREAMED else api.answer, name)
        routes.append(Route(f"/api/{name}", endpoint, methods=["POST"]))
    middleware = [Middleware(AccessMiddleware, access=access or Access())]
    handlers: dict[Any, Any] = {_Refused: _Refused.answer}
    return Starlette(routes=routes, lifespan=lifespan, middleware=middleware, exception_handlers=handlers)


def _static(text: str, suffix: str) -> Callable[[Request], Awaitable[Response]]:
    async def serve(_: Request) -> Response:
        return Response(text, media_type=_TYPES.get(suffix, _JSON), headers={"Cache-Control": "no-cache"})

    return serve


# --- requests --------------------------------------------------------------------------------------


def _error(status: int, message: str) -> Response:
    return Response(json.dumps({"error": message}), status, media_type=_JSON)


class _Refused(Exception):  # noqa: N818 -- an answer
    def __init__(self, status: int, message: str) -> None:
        self.response = _error(status, message)

    @staticmethod
    async def answer(_: Request, refused: _Refused) -> Response:
        return refused.response


async def _document(request: Request, limit: Limit, *, read_only: bool) -> Any:  # noqa: ANN401 -- JSON
    """The body as JSON, if it is not too large, and with `read_only` only if it has no files."""
    if request.headers.get("content-type", "").split(";")[0] != _JSON:
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
    if read_only and isinstance(document, dict):
        given = document.get("schedules")
        sources = [each for each in given if isinstance(each, dict)] if isinstance(given, list) else []
        if "files" in document or any(key in source for source in sources for key in _UPLOADS):
            raise _Refused(403, "this playground is read-only: it takes no files")
    return document


def _no_constant(name: str) -> None:
    raise ValueError(name)


def _message(name: str, reply: Reply) -> str:
    """Return what the page says in place of a result."""
    if reply.kind == "failure":
        sys.stderr.write(reply.text)
    smaller = "make it smaller, or use the command line"
    return {
        "error": reply.text,
        "memory": f"this needs more memory than one request may use; {smaller}",
        "failure": "an internal error; the server has printed it",
        "late": f"this takes more than {LIMITS[name].seconds:g} s here; {smaller}",
        "busy": "too many requests at once; try again",
    }[reply.kind]


@dataclass(frozen=True)
class _Api:
    pool: WorkerPool
    read_only: bool
    searches: dict[str, asyncio.Event] = field(default_factory=dict)
    """The events that stop running searches, by the id that the page gave."""

    async def answer(self, name: str, request: Request) -> Response:
        """Answer at once, unless the client leaves."""
        document = await _document(request, LIMITS[name], read_only=self.read_only)
        answering = asyncio.ensure_future(self.pool.ask(name, document))
        leaving = asyncio.ensure_future(_until_disconnected(request))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                return Response(status_code=499)  # nobody reads it
            reply = answering.result()
        finally:
            leaving.cancel()
            answering.cancel()
        if reply.kind == "result":
            return Response(reply.text, media_type=_JSON)
        return _error(_STATUS[reply.kind], _message(name, reply))

    async def stream(self, name: str, request: Request) -> Response:
        """Answer with lines of JSON: progress, and at the end the result.

        Closing a search early, or `{"stop": id}`, ends it.
        """
        if self.read_only and name == "search":
            return _error(403, "this playground is read-only: it runs no searches")
        document = await _document(request, LIMITS[name], read_only=self.read_only)
        key = ""
        if name == "search" and isinstance(document, dict):
            if set(document) == {"stop"}:
                if (stop := self.searches.get(str(document["stop"]))) is not None:
                    stop.set()
                return Response("{}", media_type=_JSON)
            key = str(document.pop("id", ""))
        return StreamingResponse(self._lines(name, document, key), media_type="application/x-ndjson")

    async def _lines(self, name: str, document: object, key: str) -> AsyncIterator[str]:
        stop = asyncio.Event() if name == "search" else None
        if stop is not None:
            self.searches[key] = stop
        replies = self.pool.stream(name, document, stop)
        try:
            async for reply in replies:
                if reply.kind in ("result", "progress"):
                    yield f'{{"{reply.kind}":{reply.text}}}\n'
                else:
                    yield json.dumps({"error": _message(name, reply)}) + "\n"
        finally:
            if stop is not None:
                self.searches.pop(key, None)
            await replies.aclose()  # type: ignore[attr-defined]  # an async generator


async def _until_disconnected(request: Request) -> None:
    """Wait until the client is gone; its body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


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
    name = f"[{host}]" if ":" in host else host
    url = f"http://{name}:{listening.getsockname()[1]}/"
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
