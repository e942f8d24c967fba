"""Promise: a process that exits right after an error has its own exit code, also if a call was abandoned."""

from __future__ import annotations

import subprocess
import sys
import time

from torch.distributed import TCPStore  # type: ignore[attr-defined]

PROGRAM = """
import sys, time
from datetime import timedelta
import torch.distributed as dist
from penstock.runtime.failure.process_detector import detector_of_job
from penstock.runtime.transport.network import call_within
from penstock.runtime.transport.network import store_connection

class Large:
    def __del__(self, sleep=time.sleep):
        sleep(3)  # the interpreter takes long to free everything

dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", int(sys.argv[1])), rank=0, world_size=1)
detector_of_job(timedelta(seconds=60))
store, large = store_connection("connect"), Large()
try:
    call_within(0.3, lambda: store.wait(["of a rank that never comes"], timedelta(seconds=60)))
except TimeoutError:
    print("exits", flush=True)
    sys.exit(3)
"""


def test_a_process_with_an_abandoned_call_has_its_own_exit_code() -> None:
    """The host of the store ends while the interpreter of this process does."""
    store = TCPStore("127.0.0.1", 0, None, is_master=True)
    with subprocess.Popen(  # noqa: S603 -- our own program
        [sys.executable, "-c", PROGRAM, str(store.port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "exits\n"
        time.sleep(1)
        del store
        _, errors = program.communicate(timeout=300)
    assert program.returncode == 3, errors
