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
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from penstock.processes import usable_cores
from penstock.web.limits import LIMITS, Limit
from penstock.web.replies import STOPPED_EARLY, Reply
from penstock.web.warm_up import WarmUp
from penstock.web.worker import serve_requests

_EXIT_SECONDS = 5.0
"""How long the exit code of a worker that ended is waited for."""
_SILENT_SECONDS = 0.5
"""How long a search waits for the warm-up before it says so."""
_COMPILING = json.dumps({"phase": "compiling the search, once after an installation"})
_OUT_OF_MEMORY = (signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS) if os.name == "posix" else ()
"""Signals of the system's memory killer, and of machine code that gets no memory."""


class Busy(Exception):  # noqa: N818 -- a state, not an error of the user
    """Too many requests wait already."""


class TooLong(Exception):  # noqa: N818 -- as above
    """A request reached its deadline."""


@dataclass(eq=False)
class _Worker:
    process: BaseProcess
    connection: Connection

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
        limit = LIMITS.get(name, Limit())
        worker = await self._acquire()
        finished = False
        try:
            await _in_thread(worker.connection.send_bytes, json.dumps([name, document]).encode())
            deadline = asyncio.get_running_loop().time() + limit.seconds
            while not finished:
                reply = await self._next(worker, deadline, stop)
                finished = reply.kind != "progress"
                yield reply
        finally:
            self._release(worker, reusable=finished)

    async def _next(self, worker: _Worker, deadline: float, stop: asyncio.Event | None) -> Reply:
        reading = asyncio.ensure_future(_in_thread(worker.connection.recv_bytes))
        stopping = asyncio.ensure_future(stop.wait()) if stop is not None and not stop.is_set() else None
        try:
            while True:
                left = deadline - asyncio.get_running_loop().time()
                waited = [task for task in (reading, stopping) if task is not None]
                done, _ = await asyncio.wait(waited, timeout=max(left, 0), return_when=asyncio.FIRST_COMPLETED)
                if reading in done:
                    return Reply.of_bytes(reading.result())
                if not done:
                    raise TooLong
                worker.connection.send_bytes(b'["stop", null]')
                stopping = None
        except EOFError:
            await _in_thread(worker.process.join, _EXIT_SECONDS)
            return exit_reply(worker.process.exitcode)
        finally:
            if stopping is not None:
                stopping.cancel()
            if not reading.done():
                worker.process.kill()  # ends the read
                with suppress(Exception):
                    await asyncio.shield(reading)

    async def _acquire(self) -> _Worker:
        if self._waiting >= self.most_waiting:
            raise Busy
        self._waiting += 1
        try:
            return await self._free.get()
        finally:
            self._waiting -= 1

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


async def _in_thread(function: Any, *arguments: Any) -> Any:  # noqa: ANN401 -- passed on
    return await asyncio.get_running_loop().run_in_executor(None, function, *arguments)
