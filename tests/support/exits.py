"""Ends training scripts that close nothing: `python -m tests.support.exits COUNT` prints their exit codes.

The processes are forked, because torch takes seconds to load, and end like any script, by the end of the file.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from penstock.processes import free_port
from penstock.runtime import Pipeline

RANKS = 2


def check_threads() -> None:
    """A thread that is in torch while the interpreter ends aborts the process, now and then."""
    if alive := [thread.name for thread in threading.enumerate() if thread.name.startswith("penstock")]:
        sys.stderr.write(f"still running: {alive}\n")
        os._exit(7)


def train(rank: int, port: int) -> Pipeline:
    """A few steps of one rank; nothing is closed, not even the process group."""
    atexit.register(check_threads)  # the last to be called
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(RANKS))
    dist.init_process_group("gloo")
    pipeline = Pipeline([nn.Linear(4, 4)], "1f1b", microbatches=2, loss=mse_loss, timeout=600)
    for _ in range(3):
        pipeline.step(torch.ones(4, 4), target=torch.zeros(4, 4))
    return pipeline


def run_once(delay: float) -> tuple[list[int], Pipeline | None]:
    """Fork all ranks; the exit codes in the parent process, the pipeline in the others."""
    port = free_port()
    children = []
    for rank in range(RANKS):
        if (child := os.fork()) == 0:
            pipeline = train(rank, port)
            time.sleep(delay)
            return [], pipeline
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children], None


kept: Pipeline | None = None
for run in range(int(sys.argv[1])):
    codes, kept = run_once(run % 10 * 0.06)  # at any time between two heartbeats
    if kept is not None:
        break
    sys.stdout.write(f"{codes}\n")
    sys.stdout.flush()
