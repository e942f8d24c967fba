"""This process on its machine: usable cores, a free port, its name in messages, the end of its parent."""

from __future__ import annotations

import multiprocessing
import os
import re
import socket
from contextlib import suppress
from random import SystemRandom


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
