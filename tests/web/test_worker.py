"""Promises of a worker: its memory limit is what a request adds, and a stop never ends the process."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from multiprocessing.connection import Connection

import pytest

from penstock.web.workers import serve_requests
from tests.support.grids import small

SEARCH = {"ranks": 6, "microbatches": 24, "seconds": 5, "live_limit": 5, "costs": {"forward_seconds": 1.3}}

LIMITED = """
import mmap
from penstock.web.workers import limit_memory
MIB = 1 << 20
loaded = bytearray({loaded} * MIB)  # as if by modules that were loaded before
limit_memory(256 * MIB)
reserved = mmap.mmap(-1, 64 << 30, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
half = bytearray(128 * MIB)
print("half")
try:
    whole = bytearray(256 * MIB)
except MemoryError:
    print("memory")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is one of Linux")
@pytest.mark.parametrize("loaded", [0, 512])
@small(lambda loaded: loaded == 512)
def test_the_memory_limit_counts_what_is_added_and_no_reserved_addresses(loaded: int) -> None:
    program = LIMITED.format(loaded=loaded)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)  # noqa: S603
    assert (done.stdout.split(), done.stderr) == (["half", "memory"], "")


def answer(connection: Connection) -> tuple[str, str]:
    """The reply after all reports of progress."""
    while True:
        kind, _, text = connection.recv_bytes().decode().partition("\n")
        if kind != "progress":
            return kind, text


@pytest.mark.skipif(sys.platform == "win32", reason="it forks")
def test_a_search_that_is_stopped_at_once_ends_with_a_schedule() -> None:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve_requests, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        for _ in range(2):  # the second is answered by the same process
            ours.send_bytes(json.dumps(["search", SEARCH]).encode())
            ours.send_bytes(b'["stop", null]')
            kind, text = answer(ours)
            assert kind == "result", text
            assert json.loads(text)["interrupted"]
    finally:
        process.kill()
        process.join()
