"""A playground that runs in this process, and requests to it."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn

from penstock.web.server import Access, create_app
from penstock.web.workers import WorkerPool

__all__ = ["Playground", "running"]


@dataclass(frozen=True)
class Playground:
    """A server, and its workers."""

    port: int
    pool: WorkerPool

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)

    def send(
        self, path: str, body: object = None, *, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes, dict[str, str]]:
        """Status, body and headers of the answer; a body that is not bytes is sent as JSON."""
        connection = self.connect()
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        kind = {} if body is None else {"Content-Type": "application/json"}
        connection.request("GET" if body is None else "POST", path, data, kind | (headers or {}))
        response = connection.getresponse()
        answer = response.read()
        connection.close()
        return response.status, answer, {name.lower(): value for name, value in response.getheaders()}

    def ask(self, name: str, body: object, **options: Any) -> tuple[int, Any]:
        status, answer, _ = self.send(f"/api/{name}", body, **options)
        return status, json.loads(answer)


@contextmanager
def running(*, read_only: bool = False, access: Access | None = None, workers: int = 2) -> Iterator[Playground]:
    """Serve until the end of the block."""
    pool = WorkerPool(size=workers)
    app = create_app(access, pool, read_only=read_only)
    config = uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.02)
    while not pool.is_warm:
        time.sleep(0.02)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield Playground(port, pool)
    finally:
        server.should_exit = True
        thread.join()
