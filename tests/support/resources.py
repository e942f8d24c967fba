"""Counts of what a process holds: threads, descriptors, memory, tensors, child processes."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

import torch
import torch.distributed as dist

__all__ = [
    "children",
    "descriptors",
    "live_tensors",
    "new_threads",
    "resident",
    "settled",
    "settled_descriptors",
    "threads",
]


def threads() -> int:
    """How many threads this process has, those of libraries included."""
    return len(list(Path("/proc/self/task").iterdir()))


def new_threads(before: Collection[threading.Thread]) -> list[str]:
    """The names of Python threads that are not in this list, after those that end had time to."""

    def found() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread not in before]

    settled(lambda: len(found()))
    return found()


def settled(count: Callable[[], int], seconds: float = 2) -> int:
    """A count that may still decrease: its value when it is 0, or after this time."""
    end = time.monotonic() + seconds
    while (left := count()) and time.monotonic() < end:
        time.sleep(0.02)
    return left


def descriptors() -> int:
    """How many files and sockets this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def settled_descriptors() -> int:
    """The same after all ranks had time to close theirs."""
    gc.collect()
    dist.barrier()
    time.sleep(0.3)
    return descriptors()


def resident() -> int:
    """The bytes of memory this process uses."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def live_tensors() -> int:
    """How many tensors the garbage collector knows."""
    gc.collect()
    return sum(torch.is_tensor(each) for each in gc.get_objects())


def children() -> list[str]:
    """The child processes that were not waited for."""
    return [
        child
        for task in Path("/proc/self/task").iterdir()
        for child in (task / "children").read_text(encoding="ascii").split()
    ]
