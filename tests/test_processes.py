"""Promises about processes: usable cores, free ports, and children that do not outlive their parent."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

from penstock.processes import end_with_parent, free_port, usable_cores
from tests.support.slowness import slowness

PARENT = """
import multiprocessing, time
from penstock.processes import end_with_parent
child = multiprocessing.get_context("fork").Process(target=end_with_parent, args=(3,))
child.start()
print(child.pid, flush=True)
time.sleep(600)
"""


def test_there_is_a_usable_core() -> None:
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)


def test_a_free_port_can_be_bound() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", free_port()))


def test_no_outgoing_connection_takes_a_free_port() -> None:
    assert all(10_000 <= free_port() < 30_000 for _ in range(20))


def test_a_process_without_a_parent_process_goes_on() -> None:
    end_with_parent(3)


def test_a_child_ends_with_a_parent_that_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)  # noqa: S603
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 30 * slowness()
    while is_running(child):
        assert time.monotonic() < deadline, "the child still runs"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:  # noqa: PTH123 -- a zombie waits for init
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
