"""The name of a process in messages, such as "pid 4711 on node3", and the pid in it."""

from __future__ import annotations

import os
import re
import socket

_NAME = re.compile(r"pid (\d+) on (.*)")


def process_name() -> str:
    """The name of this process."""
    return f"pid {os.getpid()} on {socket.gethostname()}"


def local_pid(name: str) -> int | None:
    """The pid in a name, if the process is on this machine."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found and found[2] == socket.gethostname() else None


def has_ended(name: str) -> bool:
    """Whether a process of this machine does not exist any more; False for those of others."""
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
