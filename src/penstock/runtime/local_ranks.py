"""Ranks on this machine: processes joined by gloo, started once and called many times.

    with LocalRanks(2) as ranks:
        losses = ranks.run(train, "1f1b")    # train("1f1b") on both; what they give, rank by rank

Functions, what they are given and what they give travel by pickle, so functions are those of a module. The
processes end with the one that started them, however that ends. Ctrl-C is for that one alone to hear.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
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

__all__ = ["Failure", "LocalRanks"]

_PRELOADED = ["torch", "torch.distributed", "torch._dynamo", "penstock.runtime"]
_GRACE = 10
"""Seconds that the others have to end once a rank has failed."""


@dataclass(frozen=True)
class Failure:
    """What a rank raised."""

    message: str
    """In one line, such as `ValueError: 3 rows are too few`."""
    details: str = ""
    """The traceback."""
    error: PenstockError | None = None
    """The error itself if it is one of ours, which can be raised again elsewhere."""


class LocalRanks:
    """So many ranks; started at the first call, and anew if some of them are gone."""

    def __init__(self, count: int) -> None:
        if (whole_number(count) or 0) < 1:
            raise PipelineError(f"ranks are a whole number of at least 1 (given {printable(repr(count))})")
        self.count = count
        self._context = multiprocessing.get_context("forkserver")
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What `function(*args)` gives on every rank; raises what one rank raised, once."""
        answers = self.answers(function, *args)
        failed = [(rank, answer) for rank, answer in enumerate(answers) if isinstance(answer, Failure)]
        # who did not end in time waited for the one that raised
        for rank, failure in sorted(failed, key=lambda each: not each[1].details):
            if failure.error is not None:
                raise failure.error
            raise PipelineError(f"{function.__name__}() failed on rank {rank}: {failure.message}")
        return answers

    def answers(
        self, function: Callable[..., Any], *args: Any, seconds: float | None = None, lost: Sequence[int] = ()
    ) -> list[Any]:
        """The same, with a `Failure` where a rank raised, died, or took longer than so many seconds.

        Without `seconds` they have all the time they need, but once one has failed the others must end soon.
        Ranks in `lost` are meant to die. After a failure all are started anew at the next call.
        """
        self._start()
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # it is dead: there will be no answer either
                pipe.send((function, args))
        answers: list[Any] = [None] * self.count
        missing = dict(enumerate(self._pipes))
        end = inf if seconds is None else time.monotonic() + seconds
        while missing and (left := end - time.monotonic()) > 0:
            waited_for = {pipe: rank for rank, pipe in missing.items()}
            for ready in wait(list(waited_for), None if left == inf else left):
                rank = waited_for[ready]  # type: ignore[index]
                answers[rank] = self._heard(rank, lost)
                del missing[rank]
                if seconds is None and isinstance(answers[rank], Failure):
                    end = min(end, time.monotonic() + _GRACE)
        for rank in missing:
            answers[rank] = Failure("it did not end in time")
        if lost or any(isinstance(answer, Failure) for answer in answers):
            self.stop()
        return answers

    def _heard(self, rank: int, lost: Sequence[int]) -> Any:
        try:
            return self._pipes[rank].recv()
        except (EOFError, OSError):
            return None if rank in lost else Failure(self._how_it_died(rank))

    def _how_it_died(self, rank: int) -> str:
        self._processes[rank].join(5)
        code = self._processes[rank].exitcode
        by = f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"
        return f"the process ended {by}{', as it does when memory runs out' if code == -signal.SIGKILL else ''}"

    def _start(self) -> None:
        if self._processes and all(process.is_alive() for process in self._processes):
            return
        self.stop()
        self._context.set_forkserver_preload(_PRELOADED)
        with _deaf_to_ctrl_c():
            forkserver.ensure_running()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(self.count):
            ours, theirs = self._context.Pipe()
            self._pipes.append(ours)
            process = self._context.Process(target=_work, args=(rank, self.count, port, theirs), daemon=True)
            self._processes.append(process)
            process.start()
            theirs.close()

    def stop(self) -> None:
        """End all processes; the next call starts them again."""
        started = [process for process in self._processes if process.pid is not None]
        for process in started:
            process.kill()
        for process in started:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def __enter__(self) -> LocalRanks:  # noqa: PYI034 -- Self comes with Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


@contextlib.contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """What is started in here never hears it, nor does anything that starts."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


# --- in the processes ------------------------------------------------------------------------------


def _work(rank: int, count: int, port: int, pipe: Connection) -> None:
    """The life of a rank."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.dup2(2, 1)  # what a command answers on stdout is for the one that started it to say
    torch.set_num_threads(1)
    # torch asks for the name of 127.0.0.1 at every connection, and a name server may leave that unanswered
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(count))
    dist.init_process_group("gloo")
    with contextlib.suppress(EOFError):
        while True:
            answer = _answer(pipe)
            sys.stdout.flush()
            _send(pipe, answer)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _answer(pipe: Connection) -> Any:
    try:
        function, args = pipe.recv()
        return function(*args)
    except EOFError:
        raise
    except BaseException as error:  # noqa: BLE001 -- told to the one that asked
        message = "".join(traceback.format_exception_only(error)).strip()
        return Failure(message, traceback.format_exc(), error if isinstance(error, PenstockError) else None)


def _send(pipe: Connection, answer: Any) -> None:
    try:
        pipe.send(answer)
    except (AttributeError, TypeError, ValueError) as error:  # pickle's way to say that it cannot
        pipe.send(Failure(f"{type(answer).__name__} cannot be sent back: {error}"))
