"""Access: requests for another host or from another site are refused, and the page loads nothing else."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
