"""This process on its machine: usable cores, a free port, and the end of the parent process."""

from __future__ import annotations

import multiprocessing
import os
import socket

__all__ = ["end_with_parent", "free_port", "usable_cores"]


def usable_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_port() -> int:
    """A TCP port of 127.0.0.1 that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def end_with_parent(exit_code: int) -> None:
    """Exit when the parent process ends, however it ends; for a thread of a child process."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(exit_code)
