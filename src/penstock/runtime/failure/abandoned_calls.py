"""Ends abandoned calls of torch before the interpreter ends, so that the process keeps its exit code.

A call to the job's store that takes too long, or whose partner has ended, is abandoned on its thread
(`transport/bounded.py`). If it returns while the interpreter ends, such as when the store's host ends too,
Python before 3.14 ends the thread inside of C++ code, and that aborts the process.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

from penstock.runtime.transport.stores import THREAD_NAME, open_connections, unwrapped

_END_SECONDS = 2.0  # that calls to the store need; others, such as of gloo, wait longer and are left
_DESCRIPTOR = re.compile(r"\bfd=([0-9]+)")


def end_abandoned_calls() -> None:
    """End the connections to the store on which calls still wait, and wait for their threads."""
    calls = [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]
    if not calls:
        return
    for descriptor in _store_descriptors():
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.shutdown(socket.SHUT_RDWR)
    end = time.monotonic() + _END_SECONDS
    for call in calls:
        call.join(max(0.0, end - time.monotonic()))


def _store_descriptors() -> Iterator[int]:
    """The sockets of Penstock's own connections to the store, which only their descriptions tell."""
    for store in open_connections():
        if (found := _DESCRIPTOR.search(repr(unwrapped(store)))) is not None:
            yield int(found[1])
