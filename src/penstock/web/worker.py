"""A worker process: takes requests from a pipe, computes them within a memory limit, answers with JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from penstock.errors import PenstockError
from penstock.processes import end_with_parent
from penstock.web.api import REQUESTS
from penstock.web.frontier import pareto
from penstock.web.limits import LIMITS, Limit
from penstock.web.live_search import live_search
from penstock.web.replies import STOPPED_EARLY, send_reply


def serve_requests(connection: Connection) -> None:
    """Answer until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the server ends this process
    threading.Thread(target=end_with_parent, args=(0,), daemon=True).start()
    while True:
        try:
            name, document = json.loads(connection.recv_bytes())
        except EOFError:
            return
        if name == "stop":  # of a search that had ended already
            continue
        send_reply(connection, *_answer(connection, name, document))


def _answer(connection: Connection, name: str, document: object) -> tuple[str, str]:
    limit = LIMITS.get(name, Limit())
    try:
        limit_memory(limit.memory)
        if name == "search":
            result: Any = live_search(document, connection)
        elif name == "pareto":
            result = pareto(document, lambda found: send_reply(connection, "progress", _dumps(found)))
        else:
            result = REQUESTS[name](document)
        return "result", _dumps(result)
    except PenstockError as error:
        return "error", str(error)
    except KeyboardInterrupt:  # the user's stop
        return "error", STOPPED_EARLY
    except (MemoryError, RecursionError):
        return "memory", ""
    except Exception:  # noqa: BLE001 -- the server answers, and prints it
        return "failure", traceback.format_exc()


def _dumps(record: object) -> str:
    return json.dumps(record, separators=(",", ":"), allow_nan=False)


def limit_memory(more: int) -> None:
    """Let this process use so many bytes of writable memory in addition to what it has.

    Address space is not limited: threads, of which a search has one for each core, and libraries reserve much
    more of it than they use.
    """
    if sys.platform != "linux":
        return
    import resource  # noqa: PLC0415 -- not on every platform

    with suppress(ValueError, OSError):
        pages = int(open("/proc/self/statm").read().split()[5])  # noqa: SIM115, PTH123 -- one line of the kernel
        limit = pages * os.sysconf("SC_PAGE_SIZE") + more
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
