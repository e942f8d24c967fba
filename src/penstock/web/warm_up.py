"""The warm-up of the playground: machine code of the search is compiled once, beside the workers.

    server starts --> warm-up process compiles, or finds the code in the cache on disk --> it ends
                      a search that begins meanwhile waits; all other requests do not

Workers then load the code from the cache, in a fraction of a second. Without this, the first search after an
installation would compile in its worker, within its time limit.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from multiprocessing.process import BaseProcess
from typing import Any

from penstock.processes import end_with_parent


def compile_search() -> None:
    """Compile what searches run, or find it in the cache; the target of the warm-up process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the server ends this process
    threading.Thread(target=end_with_parent, args=(0,), daemon=True).start()
    from penstock.search.driver import compile_kernels  # noqa: PLC0415 -- loads the compiler

    compile_kernels()


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
        stopping = None if stop is None else asyncio.ensure_future(stop.wait())
        try:
            waited = [task for task in (self._ended, stopping) if task is not None]
            await asyncio.wait(waited, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if stopping is not None:
                stopping.cancel()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()
