"""The name of a process in messages, such as "pid 4711 on node3", and the pid in it."""

from __future__ import annotations

import os
import re
import socket

__all__ = ["local_pid", "process_name"]

_NAME = re.compile(r"pid (\d+) on (.*)")


def process_name() -> str:
    """The name of this process."""
    return f"pid {os.getpid()} on {socket.gethostname()}"


def local_pid(name: str) -> int | None:
    """The pid in a name, if the process is on this machine."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found and found[2] == socket.gethostname() else None
