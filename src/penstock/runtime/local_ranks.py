"""Ranks on this machine: processes of one gloo group, started once and called many times.

    with LocalRanks(2) as ranks:
        losses = ranks.run(train, "1f1b")    # calls train("1f1b") on both; the results, rank by rank

Functions, arguments and results are pickled, so functions must be at the top level of a module. The processes
end with the process that started them, however it ends. Only that process handles Ctrl-C.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from penstock.arguments import printable, whole_number
from penstock.errors import PenstockError, PipelineError
from penstock.processes import end_with_parent, free_port
from penstock.runtime.torch_internals.modules import COMPILER

_PRELOADED = ["torch", "torch.distributed", COMPILER, "penstock.api", "penstock.runtime"]
_GRACE = 10
"""Seconds that the other ranks have to finish once a rank has failed."""


@dataclass(frozen=True)
class Failure:
    """The failure of a rank."""

    message: str
    """One line, such as `ValueError: 3 rows are too few`."""
    details: str = ""
    """The traceback."""
    error: PenstockError | None = None
    """The exception itself if it is a `PenstockError`, which can be pickled and raised again."""


class LocalRanks:
    """`count` ranks; started at the first call, and again if some of them have ended."""

    def __init__(self, count: int) -> None:
        if (whole_number(count) or 0) < 1:
            raise PipelineError(
                f"the number of ranks must be a whole number of at least 1 (given {printable(repr(count))})"
            )
        self.count = count
        self._context = multiprocessing.get_context("forkserver")
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return the results of `function(*args)` by rank; raise the error of the first rank that failed."""
        results = self.results(function, *args)
        failed = [(rank, result) for rank, result in enumerate(results) if isinstance(result, Failure)]
        # a rank that timed out waited for the rank that raised, which has a traceback
        for rank, failure in sorted(failed, key=lambda each: not each[1].details):
            if failure.error is not None:
                raise failure.error
            raise PipelineError(f"{function.__name__}() failed on rank {rank}: {failure.message}")
        return results

    def results(
        self,
        function: Callable[..., Any],
        *args: Any,
        seconds: float | None = None,
        may_die: Sequence[int] = (),
    ) -> list[Any]:
        """Return the results, with a `Failure` for a rank that raised, died, or took longer than `seconds`.

        Without `seconds` there is no limit, but once a rank has failed the others must finish soon. Ranks in
        `may_die` are not waited for, and give None if they die or are late. After a failure the next call
        starts all ranks again.
        """
        self._start()
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # a dead process: receiving fails, too
                pipe.send((function, args))
        results: list[Any] = [None] * self.count
        pending = dict(enumerate(self._pipes))
        deadline = inf if seconds is None else time.monotonic() + seconds
        while pending.keys() - set(may_die) and (left := deadline - time.monotonic()) > 0:
            rank_of = {pipe: rank for rank, pipe in pending.items()}
            for ready in wait(list(rank_of), None if left == inf else left):
                rank = rank_of[ready]  # type: ignore[index]
                results[rank] = self._receive(rank, may_die)
                del pending[rank]
                if seconds is None and isinstance(results[rank], Failure):
                    deadline = min(deadline, time.monotonic() + _GRACE)
        for rank in pending.keys() - set(may_die):
            results[rank] = Failure("timed out")
        if may_die or any(isinstance(result, Failure) for result in results):
            self.stop()
        return results

    def _receive(self, rank: int, may_die: Sequence[int]) -> Any:
        try:
            return self._pipes[rank].recv()
        except (EOFError, OSError):
            if rank in may_die:
                return None
            self._processes[rank].join(5)
            code = self._processes[rank].exitcode
            how = f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"
            out_of_memory = " (the process may have run out of memory)" if code == -signal.SIGKILL else ""
            return Failure(f"the process ended {how}{out_of_memory}")

    def _start(self) -> None:
        if self._processes and all(process.is_alive() for process in self._processes):
            return
        self.stop()
        start_fork_server()
        port = free_port()
        for rank in range(self.count):
            own_end, child_end = self._context.Pipe()
            self._pipes.append(own_end)
            process = self._context.Process(
                target=_serve, args=(rank, self.count, port, child_end), daemon=True
            )
            self._processes.append(process)
            process.start()
            child_end.close()

    def stop(self) -> None:
        """Kill all processes; the next call starts them again."""
        started = [process for process in self._processes if process.pid is not None]
        for process in started:
            process.kill()
        for process in started:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def __enter__(self) -> LocalRanks:  # noqa: PYI034 -- Self needs Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def start_fork_server() -> None:
    """Start the process from which ranks are forked, unless it runs; it loads torch while this one goes on."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOADED)
    with _ignore_sigint():
        forkserver.ensure_running()


@contextlib.contextmanager
def _ignore_sigint() -> Iterator[None]:
    """Processes started in here ignore SIGINT, and so do their children."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


# --- in the processes ------------------------------------------------------------------------------


def _serve(rank: int, count: int, port: int, pipe: Connection) -> None:
    """Join the process group, then run the functions that arrive through the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, args=(1,), daemon=True).start()
    os.dup2(2, 1)  # stdout belongs to the parent process
    torch.set_num_threads(1)
    gc.freeze()  # modules are no garbage: collections take much less time without them
    # torch resolves 127.0.0.1 for every connection, and a name server may not answer
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(count))
    dist.init_process_group("gloo")
    serve_calls(pipe)


def serve_calls(pipe: Connection) -> None:
    """Run the functions that arrive through the pipe, until it is closed."""
    with contextlib.suppress(EOFError):
        while True:
            result = _call(pipe)
            sys.stdout.flush()
            try:
                pipe.send(result)
            except (AttributeError, TypeError, ValueError) as error:  # what pickle raises
                pipe.send(Failure(f"the result of type {type(result).__name__} cannot be pickled: {error}"))


def _call(pipe: Connection) -> Any:
    try:
        function, args = pipe.recv()
        return function(*args)
    except EOFError:
        raise
    except BaseException as error:  # noqa: BLE001 -- the parent process gets it
        message = "".join(traceback.format_exception_only(error)).strip()
        return Failure(message, traceback.format_exc(), error if isinstance(error, PenstockError) else None)
