"""Worker processes: every request is computed in one, and a request that is late or cancelled ends its process.

    request --> free worker --> reply
                   |  deadline, or the client is gone: the process is killed, another one takes its place

Processes, not threads, because a thread cannot be stopped, and its memory cannot be limited. They are forked
from a server that has everything loaded, so a new one takes milliseconds.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

from penstock.errors import PenstockError
from penstock.processes import end_with_parent, usable_cores
from penstock.web.answers import REQUESTS, live_search, pareto

# Replies of a worker on its pipe: the kind, a line feed, and the text as it is: JSON is encoded once.

STOPPED_EARLY = "stopped before a schedule was found"
"""The error of a search that the user stops too early."""


class Reply(NamedTuple):
    """A part of the answer of a worker: JSON text, or an error of the request."""

    kind: str
    """`result`, `progress`, `error` (of the user), `memory`, `failure` (ours), `late`, `busy`."""
    text: str

    def send(self, connection: Connection) -> None:
        """Send it from the worker to the server."""
        connection.send_bytes("\n".join(self).encode())


class Limit(NamedTuple):
    """Of one kind of request."""

    seconds: float = 15.0
    body: int = 8 * 1024 * 1024
    """Bytes."""
    memory: int = 3 * 1024**3
    """Bytes of writable memory that the worker may add to what it has when the request begins."""


LIMITS = dict.fromkeys(REQUESTS, Limit()) | {
    "edit": Limit(10.0),
    "robustness": Limit(30.0),
    "pareto": Limit(30.0),
    "export": Limit(30.0),
    "search": Limit(150.0, memory=6 * 1024**3),
    "trace": Limit(60.0, body=64 * 1024 * 1024),
}
"""By the name of the request."""


def _begin_child() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the server ends this process
    threading.Thread(target=end_with_parent, args=(0,), daemon=True).start()


def serve_requests(connection: Connection) -> None:
    """Answer until the other end is closed."""
    _begin_child()
    while True:
        try:
            name, document = json.loads(connection.recv_bytes())
        except EOFError:
            return
        if name == "stop":  # of a search that had ended already
            continue
        _reply_to(connection, name, document).send(connection)


def _reply_to(connection: Connection, name: str, document: object) -> Reply:
    def report(text: str) -> None:
        Reply("progress", text).send(connection)

    try:
        limit_memory(LIMITS[name].memory)
        if name == "search":
            result = live_search(document, connection, report)
        elif name == "pareto":
            result = pareto(document, lambda found: report(_dumps(found)))
        else:
            result = REQUESTS[name](document)
        return Reply("result", _dumps(result))
    except PenstockError as error:
        return Reply("error", str(error))
    except KeyboardInterrupt:  # the user's stop
        return Reply("error", STOPPED_EARLY)
    except (MemoryError, RecursionError):
        return Reply("memory", "")
    except Exception:  # noqa: BLE001 -- the server answers, and prints it
        return Reply("failure", traceback.format_exc())


def _dumps(record: object) -> str:
    return json.dumps(record, separators=(",", ":"), allow_nan=False)


def limit_memory(more: int) -> None:
    """Let this process use so many bytes of writable memory in addition to what it has.

    Address space is not limited: threads, of which a search has one for each core, and libraries reserve much
    more of it than they use.
    """
    if sys.platform != "linux":
        return
    import resource  # noqa: PLC0415 -- not on every platform

    with suppress(ValueError, OSError):
        pages = int(open("/proc/self/statm").read().split()[5])  # noqa: SIM115, PTH123 -- one line of the kernel
        limit = pages * os.sysconf("SC_PAGE_SIZE") + more
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


# The warm-up of the playground: machine code of the search is compiled once, beside the workers.
#
#     server starts --> warm-up process compiles, or finds the code in the cache on disk --> it ends
#                       a search that begins meanwhile waits; all other requests do not
#
# Workers then load the code from the cache, in a fraction of a second. Without this, the first search after an
# installation would compile in its worker, within its time limit.


def compile_search() -> None:
    """Compile what searches run, or find it in the cache; the target of the warm-up process."""
    _begin_child()
    from penstock.search.driver import compile_kernels  # noqa: PLC0415 -- loads the compiler

    compile_kernels()


async def _wait(task: asyncio.Future[Any], stop: asyncio.Event | None, seconds: float | None) -> None:
    """Return when the task is done, `stop` is set, or after so many seconds."""
    stopping = None if stop is None else asyncio.ensure_future(stop.wait())
    try:
        waited = [each for each in (task, stopping) if each is not None]
        await asyncio.wait(waited, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if stopping is not None:
            stopping.cancel()


class WarmUp:
    """The warm-up process, and those who wait for its end."""

    def __init__(self, context: Any) -> None:  # noqa: ANN401 -- a context of multiprocessing
        self._process: BaseProcess = context.Process(target=compile_search, daemon=True)
        self._process.start()
        self._ended = asyncio.ensure_future(asyncio.to_thread(self._process.join))

    @property
    def is_over(self) -> bool:
        """Whether the process has ended; if it failed, searches compile in their workers."""
        return self._ended.done()

    async def wait(self, stop: asyncio.Event | None, seconds: float | None = None) -> None:
        """Return when the process has ended, `stop` is set, or after so many seconds."""
        await _wait(self._ended, stop, seconds)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()


_EXIT_SECONDS = 5.0
"""How long the exit code of a worker that ended is waited for."""
_SILENT_SECONDS = 0.5
"""How long a search waits for the warm-up before it says so."""
_COMPILING = json.dumps({"phase": "compiling the search, once after an installation"})
_OUT_OF_MEMORY = (signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS) if os.name == "posix" else ()
"""Signals of the system's memory killer, and of machine code that gets no memory."""


@dataclass(eq=False)
class _Worker:
    process: BaseProcess
    connection: Connection
    is_stopping: bool = False
    """Whether its search was told to stop."""

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


@dataclass(eq=False)
class WorkerPool:
    """A few worker processes, and those who wait for one."""

    size: int = field(default_factory=lambda: max(2, min(4, usable_cores())))
    most_waiting: int = 200
    _free: asyncio.Queue[_Worker] = field(init=False)
    _all: set[_Worker] = field(default_factory=set)
    _waiting: int = 0
    _context: Any = None
    _warm_up: WarmUp | None = None

    def start(self, *, searches: bool = True) -> None:
        """Start all processes, with `searches` the warm-up too; call it in the event loop."""
        self._free = asyncio.Queue()
        method = "forkserver" if sys.platform != "win32" else "spawn"
        self._context = multiprocessing.get_context(method)
        if method == "forkserver":
            self._context.set_forkserver_preload(["penstock.web.preload"])
        for _ in range(self.size):
            self._free.put_nowait(self._new())
        self._warm_up = WarmUp(self._context) if searches else None

    def _new(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=serve_requests, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        worker = _Worker(process, ours)
        self._all.add(worker)
        return worker

    def close(self) -> None:
        """End all processes."""
        if self._warm_up is not None:
            self._warm_up.close()
        for worker in self._all:
            worker.kill()
        self._all.clear()

    @property
    def is_warm(self) -> bool:
        """Whether no search has to wait for the warm-up."""
        return self._warm_up is None or self._warm_up.is_over

    @property
    def pids(self) -> list[int]:
        """Of the processes."""
        return [worker.process.pid or 0 for worker in self._all]

    async def ask(self, name: str, document: object) -> Reply:
        """The answer to one request. If the task is cancelled, or late, its worker is replaced."""
        async for reply in self.stream(name, document):
            if reply.kind != "progress":
                return reply
        raise AssertionError("a stream ends with an answer")

    async def stream(
        self, name: str, document: object, stop: asyncio.Event | None = None
    ) -> AsyncIterator[Reply]:
        """Reports of progress, and the answer. Setting `stop` asks the worker to end with the best so far."""
        if name == "search" and self._warm_up is not None and not self.is_warm:
            await self._warm_up.wait(stop, _SILENT_SECONDS)
            if not self.is_warm:
                yield Reply("progress", _COMPILING)
                await self._warm_up.wait(stop)
            if stop is not None and stop.is_set():
                yield Reply("error", STOPPED_EARLY)
                return
        if self._waiting >= self.most_waiting:
            yield Reply("busy", "")
            return
        self._waiting += 1
        try:
            worker = await self._free.get()
        finally:
            self._waiting -= 1
        reply, worker.is_stopping = Reply("progress", ""), False
        try:
            await asyncio.to_thread(worker.connection.send_bytes, json.dumps([name, document]).encode())
            deadline = asyncio.get_running_loop().time() + LIMITS[name].seconds
            while reply.kind == "progress":
                reply = await self._next(worker, deadline, stop)
                yield reply
        finally:
            self._release(worker, reusable=reply.kind not in ("progress", "late"))

    async def _next(self, worker: _Worker, deadline: float, stop: asyncio.Event | None) -> Reply:
        reading = asyncio.ensure_future(asyncio.to_thread(worker.connection.recv_bytes))
        try:
            while True:
                left = deadline - asyncio.get_running_loop().time()
                stopping = None if worker.is_stopping else stop
                await _wait(reading, stopping, max(left, 0))
                if reading.done():
                    return Reply(*reading.result().decode().split("\n", 1))
                if stopping is None or not stopping.is_set():
                    return Reply("late", "")
                worker.connection.send_bytes(b'["stop", null]')
                worker.is_stopping = True
        except EOFError:
            await asyncio.to_thread(worker.process.join, _EXIT_SECONDS)
            return exit_reply(worker.process.exitcode)
        finally:
            if not reading.done():
                worker.process.kill()  # ends the read
                with suppress(Exception):
                    await asyncio.shield(reading)

    def _release(self, worker: _Worker, *, reusable: bool) -> None:
        if worker not in self._all:
            return  # closed meanwhile
        if not reusable or not worker.process.is_alive():
            worker.kill()
            self._all.discard(worker)
            worker = self._new()
        self._free.put_nowait(worker)


def exit_reply(code: int | None) -> Reply:
    """The reply for a worker that ended without one: it had no memory, if its signal says so, or a fault."""
    if code is not None and -code in _OUT_OF_MEMORY:
        return Reply("memory", "")
    how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
    return Reply("failure", f"a worker process of the playground ended with {how}\n")
