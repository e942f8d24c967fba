"""This process on its machine: cores, a free port, its name, the end of its parent, calls with a time limit."""

from __future__ import annotations

import multiprocessing
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from random import SystemRandom
from typing import TypeVar

T = TypeVar("T")


def usable_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_OWN_PORTS = range(10_000, 30_000)
"""Below the ports that systems use for outgoing connections, which could take a port before it is bound."""


def free_port() -> int:
    """A TCP port that is free now, and that no outgoing connection takes."""
    for port in [*SystemRandom().sample(_OWN_PORTS, 50), 0]:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return int(probe.getsockname()[1])
    raise OSError("no TCP port is free")


def end_with_parent(exit_code: int) -> None:
    """Exit when the parent process ends, however it ends; for a thread of a child process."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(exit_code)


_NAME = re.compile(r"pid (\d+) on (.*)")


def process_name() -> str:
    """The name of this process."""
    return f"pid {os.getpid()} on {socket.gethostname()}"


def local_pid(name: str) -> int | None:
    """The pid in a name, if the process is on this machine."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found and found[2] == socket.gethostname() else None


def has_ended(name: str) -> bool:
    """Whether a process of this machine does not exist any more; False for processes of other machines."""
    pid = local_pid(name)
    if pid is None:
        return False
    try:
        os.kill(pid, 0)  # only asks whether it exists
    except ProcessLookupError:
        return True
    except OSError:  # it belongs to another user
        pass
    return False


CALL_THREAD = "penstock-call"
"""The name of threads that run a call with a time limit."""
_CHECK_SECONDS = 0.1


def call_within(seconds: float, call: Callable[[], T], check: Callable[[], None] = lambda: None) -> T:
    """Return the result of `call`, made on a thread; raise TimeoutError and abandon it if it takes longer.

    `check` is called ten times per second meanwhile, and may raise.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 -- it is raised on the calling thread
            future.set_exception(error)

    threading.Thread(target=run, name=CALL_THREAD, daemon=True).start()
    end = time.monotonic() + seconds
    while not wait([future], min(_CHECK_SECONDS, seconds)).done:
        check()
        if time.monotonic() > end:
            raise TimeoutError(f"no answer within {seconds:g} s")
    return future.result()
